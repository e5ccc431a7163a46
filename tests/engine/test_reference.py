"""The reference engine: a meaning for every op, kernels of one's own, errors that show the line, values that die in time."""

from __future__ import annotations

import weakref

import pytest
import torch

import airgraph
from airgraph.engine.meanings import MEANINGS, STRUCTURAL, USER_KERNELS, has_kernel
from airgraph.engine.reference import ReferenceExecutable
from airgraph.errors import ConfigError, EngineError
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Note, Value
from airgraph.ir.ops import OPS

CPU = torch.device("cpu")


def data(index: int, *shape: int, dtype: int = 0) -> Value:
    return ge.Data(index=index, dtype=dtype, shape=shape, placement="CPU", node_name=f"x{index}")


@pytest.fixture
def graph():
    with ge.building(Graph("graph_1")) as built:
        yield built


@pytest.fixture
def kernels():
    """Kernels a test registers go with it."""
    yield USER_KERNELS
    USER_KERNELS.clear()


def run(graph: Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs, _ = ReferenceExecutable(graph, CPU).run({f"x{i}": x for i, x in enumerate(inputs)}, {})
    return list(outputs)


# -- meanings -------------------------------------------------------------------------------------------------------
def test_every_op_has_a_meaning_or_is_structural() -> None:
    assert set(OPS) - set(MEANINGS) - STRUCTURAL == set(), "ops without a meaning"
    assert set(MEANINGS) - set(OPS) == set(), "meanings without an op"
    assert set(STRUCTURAL) - set(OPS) == set(), "structural ops that are not in the table"
    assert set(MEANINGS) & STRUCTURAL == set(), "ops that have both"


def test_has_kernel(kernels) -> None:
    assert has_kernel("Mul") and has_kernel("AtenCall") and not has_kernel("Mine")
    airgraph.register_kernel("Mine")(lambda x: x)
    assert has_kernel("Mine")


def test_a_graph_runs(graph) -> None:
    x = data(0, 2, 3)
    ge.NetOutput([ge.Mul(ge.Exp(x), ge.Const(2.0, dtype=0)), ge.ReduceSum(x, [1])])
    value = torch.randn(2, 3)
    got = run(graph, value)
    assert torch.equal(got[0], value.exp() * 2) and torch.equal(got[1], value.sum(1))


def test_scalars_of_half_keep_their_digits(graph) -> None:
    ge.NetOutput([ge.Mul(data(0, 64, dtype=27), ge.Const(0.1, dtype=27))])
    value = torch.randn(64).bfloat16()
    assert torch.equal(run(graph, value)[0], value * 0.1)


def test_an_accelerator_gets_at_most_one_number_of_the_host(graph, monkeypatch) -> None:
    """Its kernels refuse a second one. (`meta` stands for an accelerator here; it does not refuse, hence the record.)"""
    seen = []

    def clip(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        seen.append((x.device.type, low, high))
        return torch.clamp(x, low, high)

    monkeypatch.setitem(MEANINGS, "ClipByValueV2", clip)
    x = ge.Data(index=0, dtype=0, shape=[4], placement="NPU", node_name="x0")
    ge.NetOutput([ge.ClipByValueV2(x, ge.Const(-1.0, dtype=0), ge.Const(1.0, dtype=0))])
    executable = ReferenceExecutable(graph, torch.device("meta"))
    for _ in range(2):
        executable.run({"x0": torch.empty(4, device="meta")}, {})
    assert all(t.device.type == "meta" for _, *bounds in seen for t in bounds)
    assert seen[0][1] is seen[1][1], "constants are copied to the device once"


def test_writes_are_handed_back(graph) -> None:
    x = data(0, 3)
    write = ge.Assign(x, ge.Add(x, ge.Const(1.0, dtype=0)))
    ge.NetOutput([ge.Neg(x)], dependencies=[write])
    value = torch.ones(3)
    outputs, writes = ReferenceExecutable(graph, CPU).run({"x0": value}, {})
    assert outputs[0].tolist() == [-1] * 3 and value.tolist() == [1] * 3
    assert [(name, new.tolist()) for name, new in writes] == [("x0", [2] * 3)]


def test_constants_leave_as_copies(graph) -> None:
    ge.NetOutput([ge.Reshape(ge.Const([1.0, 2.0], dtype=0), [2, 1])])
    loaded = ReferenceExecutable(graph, CPU)
    for _ in range(2):
        ((out,), _) = loaded.run({}, {})
        assert out.tolist() == [[1], [2]]
        out.zero_()


def test_zero_dimensional_arrays_stay_so(graph) -> None:
    import numpy as np

    ge.NetOutput([ge.Identity(ge.constant(np.array(3.0, dtype=np.float32), ge.DataType.DT_FLOAT))])
    assert run(graph)[0].shape == ()


# -- kernels of one's own -------------------------------------------------------------------------------------------
def test_register_kernel(graph, kernels) -> None:
    @airgraph.register_kernel("Scale")
    def scale(x, rest, *, factor):
        assert rest is None
        return x * factor

    x = data(0, 3)
    y = ge.custom_op("Scale", inputs={"x": x, "rest": None}, outputs=["y"], attrs={"factor": ge.attr.Float(2.5)})
    ge.NetOutput([y])
    assert run(graph, torch.ones(3))[0].tolist() == [2.5] * 3


def test_a_kernel_with_several_outputs_and_a_list(graph, kernels) -> None:
    airgraph.register_kernel("Both")(lambda parts: (parts[0] + parts[1], parts[0] - parts[1]))
    x, y = data(0, 3), data(1, 3)
    ge.NetOutput(ge.custom_op("Both", inputs={"parts": [x, y]}, outputs=["sum", "difference"]))
    total, difference = run(graph, torch.full((3,), 5.0), torch.ones(3))
    assert total.tolist() == [6] * 3 and difference.tolist() == [4] * 3


def test_register_kernel_refuses_ops_of_the_table() -> None:
    with pytest.raises(ConfigError) as caught:
        airgraph.register_kernel("Mul")
    assert str(caught.value) == "Mul is an op of the table and has a kernel\n  try: another name for an op of your own"


# -- errors ---------------------------------------------------------------------------------------------------------
def test_an_op_without_kernel(graph) -> None:
    x = data(0, 3)
    graph.notes.append(Note('"model.py", line 7, in forward    y = mine(x)', "mine: …"))
    ge.NetOutput([ge.custom_op("Mine", inputs={"x": x}, outputs=["y"])])
    with pytest.raises(EngineError) as caught:
        ReferenceExecutable(graph, CPU)
    text = str(caught.value)
    assert text.startswith("no kernel for GE op Mine\n")
    assert 'ge.custom_op("Mine"' in text and '"model.py", line 7, in forward    y = mine(x)' in text
    assert text.endswith('try:   @airgraph.register_kernel("Mine") on a function of tensors')


def test_a_kernel_that_fails(graph, kernels) -> None:
    @airgraph.register_kernel("Broken")
    def broken(x):
        raise ValueError("out of luck")

    graph.notes.append(Note('"model.py", line 9, in forward    y = broken(x)', "broken: …"))
    ge.NetOutput([ge.custom_op("Broken", inputs={"x": data(0, 3)}, outputs=["y"])])
    with pytest.raises(EngineError) as caught:
        run(graph, torch.ones(3))
    lines = str(caught.value).split("\n")
    assert lines[0] == "Broken failed: out of luck"
    assert lines[1].startswith('  graph: Broken_0 = ge.custom_op("Broken"')
    assert lines[2] == '  from:  "model.py", line 9, in forward    y = broken(x)'
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_kernel_with_the_wrong_number_of_outputs(graph, kernels) -> None:
    airgraph.register_kernel("Two")(lambda x: (x, x))
    ge.NetOutput([ge.custom_op("Two", inputs={"x": data(0, 3)}, outputs=["y"])])
    with pytest.raises(EngineError, match="the kernel of Two gave 2 outputs, the node has 1"):
        run(graph, torch.ones(3))


def test_errors_show_the_line_of_the_user() -> None:
    run = torch.compile(lambda x, i: x.index_select(0, i) * 2, backend=airgraph.backend())
    with pytest.raises(EngineError) as caught:
        run(torch.ones(3), torch.tensor([7]))
    text = str(caught.value)
    assert text.startswith("GatherV2 failed: ") and "graph: GatherV2_0 = ge.GatherV2(" in text
    assert "test_reference.py" in text and "x.index_select(0, i) * 2" in text


# -- how long values live -------------------------------------------------------------------------------------------
def test_a_value_dies_after_its_last_reader(graph, kernels) -> None:
    alive: list[list[bool]] = []
    made: list[weakref.ref[torch.Tensor]] = []

    @airgraph.register_kernel("Step")
    def step(x):
        alive.append([ref() is not None for ref in made])
        y = x + 1
        made.append(weakref.ref(y))
        return y

    value = data(0, 3)
    for _ in range(4):
        value = ge.custom_op("Step", inputs={"x": value}, outputs=["y"])
    ge.NetOutput([value])
    (out,) = run(graph, torch.ones(3))
    assert alive == [[], [True], [False, True], [False, False, True]]
    assert [ref() is not None for ref in made] == [False, False, False, True]
    assert out.tolist() == [5] * 3


def test_a_value_nobody_reads_dies_at_once(graph, kernels) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @airgraph.register_kernel("Pair")
    def pair(x):
        results = x + 1, x + 2
        made.append(weakref.ref(results[1]))
        return results

    @airgraph.register_kernel("Look")
    def look(x):
        alive.append(made[0]() is not None)
        return x + 0

    first, _ = ge.custom_op("Pair", inputs={"x": data(0, 3)}, outputs=["a", "b"])
    ge.NetOutput([ge.custom_op("Look", inputs={"x": first}, outputs=["y"])])
    run(graph, torch.ones(3))
    assert alive == [False]


def test_a_scalar_index_on_an_accelerator_takes_the_only_axis_away():
    x, index = torch.empty(5, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    assert MEANINGS["GatherV2"](x, index, 0).shape == ()


def test_attention_over_few_keys_by_cudnn_is_the_flash_kernel(monkeypatch) -> None:
    from airgraph.engine.meanings import attention

    asked = []

    class Kernels:
        def __init__(self) -> None:
            self._scaled_dot_product_cudnn_attention = lambda q, *rest, **named: asked.append("cudnn") or [q] * 9
            self._scaled_dot_product_flash_attention = self
            self.default = lambda q, *rest, **named: asked.append("flash") or [q] * 9

    monkeypatch.setattr(attention, "aten", Kernels())
    short, long = torch.empty(1, 2, 256, 8), torch.empty(1, 2, 257, 8)
    for keys, mask, lse in ((short, None, False), (long, None, False), (short, short, False), (short, None, True)):
        attention.fused_attention(keys, keys, keys, mask, "cudnn", 9, None, False, lse)
    attention.fused_attention(short, long, long, None, "cudnn", 9, None, True, False)
    assert asked == ["flash", "cudnn", "cudnn", "cudnn", "cudnn"]
