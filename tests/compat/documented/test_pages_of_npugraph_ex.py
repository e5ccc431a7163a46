"""Programs after TorchAir's pages on npugraph_ex, one for each statement that no other test covers.

docs/torchair_pages.md has the table: page, what is as there, and the test.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode

from airgraph.compat import npugraph_ex
from airgraph.journal import JOURNALS


class Sum(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.add(x, y)


def compiled(model: Any, fullgraph: bool = True, dynamic: bool | None = False, **options: Any) -> Any:
    return torch.compile(model, backend="npugraph_ex", fullgraph=fullgraph, dynamic=dynamic, options=options or None)


def twos(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.full(shape, 2, dtype=dtype, device="npu")


def test_quick_start() -> None:
    x, y = torch.randn(2, 2).npu(), torch.randn(2, 2).npu()
    for backend in ("npugraph_ex", "aot_eager"):
        torch._dynamo.reset()
        got = torch.compile(Sum().npu(), backend=backend, fullgraph=True, dynamic=False)(x, y)
        assert got.device.type == "npu" and torch.equal(got, x + y)


def test_a_backend_of_ones_own() -> None:
    def compiler(gm: Any, inputs: Any) -> Any:
        return torch.npu.npugraph_ex.compile_fx(gm, inputs, {"clone_input": False})

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    x = twos(2, 2, dtype=torch.int32)
    got = torch.compile(Sum().npu(), backend=backend, fullgraph=True, dynamic=False)(x, x)
    assert got.dtype == torch.int32 and got.tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize("option", ["force_eager", "force_recapture"])
def test_the_way_to_a_fault(option: str) -> None:
    """Without capturing, and capturing at every call: the results are those of the model."""
    run = compiled(Sum().npu(), **{option: True})
    for n in range(3):
        assert run(twos(2), twos(2) + n).tolist() == [4 + n] * 2


def test_memory_of_an_argument_that_is_not_cloned() -> None:
    """The first call's tensor is the graph's own: later arguments are copied into it, as the page warns."""
    first, later = twos(3), twos(3) + 5
    run = compiled(lambda x: x * 3, clone_input=False)
    assert run(first).tolist() == [6] * 3
    for _ in range(3):
        assert run(later).tolist() == [21] * 3
    assert later.tolist() == [7] * 3


@pytest.mark.parametrize("clone", [True, False])
def test_results_that_are_held(clone: bool) -> None:
    """A result that the script still holds is not overwritten: with the option as there, without it better."""
    run = compiled(lambda x: x * 3, clone_output=clone)
    held = [run(twos(2) + n) for n in range(4)]
    assert [h.tolist() for h in held] == [[6 + 3 * n] * 2 for n in range(4)]


def test_one_pool_for_several_graphs() -> None:
    pool = torch.npu.graph_pool_handle()
    runs = [compiled(lambda x, n=n: x * n, use_graph_pool=pool) for n in (2, 3)]
    assert [run(twos(2)).tolist() for run in runs for _ in range(2)] == [[4, 4], [4, 4], [6, 6], [6, 6]]


@pytest.mark.parametrize("limit", [1, 64])
def test_more_shapes_than_captures(limit: int) -> None:
    run = compiled(lambda x: x + 1, dynamic=True, capture_limit=limit)
    for n in (2, 3, 4, 2, 3):
        assert run(twos(n)).tolist() == [3] * n


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_modes_of_capturing(mode: str) -> None:
    assert compiled(lambda x: x + 1, capture_error_mode=mode)(twos(2)).tolist() == [3, 3]


def test_frozen_parameters() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, y: Any, z: Any) -> Any:
            return torch.add(x, y * z)

    given = (torch.nn.Parameter(torch.randn(4, 1).npu()), torch.randn(4, 4).npu(), torch.ones(4, 4).int().npu())
    assert isinstance(given[0], torch.nn.Parameter)
    run = compiled(Model(), frozen_parameter=True)
    for _ in range(2):
        torch.testing.assert_close(run(*given), Model()(*given))


def test_noops_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    npugraph_ex.logger.setLevel(logging.DEBUG)
    compiled(lambda x, y: x[:] + y)(twos(2), twos(2))
    log = capfd.readouterr().out
    after = log.partition("after fx graph optimization, graph is graph():")[2].partition("[DEBUG]")[0]
    assert "aten.add.Tensor" in after and "aten.slice" not in after


def stream_pass(gm: Any, inputs: Any, config: Any) -> None:
    """`mm` and `abs` on a stream of their own, and `sub` after them."""
    graph, aten, air = gm.graph, torch.ops.aten, torch.ops.air
    mm, absolute, sub = (
        next(n for n in graph.nodes if n.target is target)
        for target in (aten.mm.default, aten.abs.default, aten.sub.Tensor)
    )
    with graph.inserting_before(mm):
        graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
    with graph.inserting_after(absolute):
        record = graph.call_function(air.record.default, ())
    with graph.inserting_after(record):
        graph.call_function(air.scope_exit.default, ())
    with graph.inserting_before(sub):
        graph.call_function(air.wait.default, ([record],))


def two_branches(x: Any) -> Any:
    mm = torch.mm(x, x)
    return torch.add(torch.abs(mm), 1), torch.sub(x, mm)


def test_a_pass_and_a_profile(tmp_path: Path) -> None:
    x = torch.randn(3, 3).npu()
    run = compiled(two_branches, post_grad_custom_pre_pass=stream_pass)
    torch.testing.assert_close(run(x), two_branches(x))
    activities = [torch_npu.profiler.ProfilerActivity.NPU, torch_npu.profiler.ProfilerActivity.CPU]
    with torch_npu.profiler.profile(
        activities=activities,
        with_stack=True,
        schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=0),
        on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./prof"),
    ) as prof:
        run(x)
    prof.step()
    assert list(tmp_path.glob("prof/*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))


def on_two_streams(in1: Any, in2: Any, in3: Any, in4: Any) -> Any:
    stream1, stream2 = torch.npu.Stream(), torch.npu.Stream()
    event1, event2 = torch.npu.Event(), torch.npu.Event()
    add = torch.add(in1, in2)
    both = in3 + in4
    event1.record()
    with torch.npu.stream(stream1):
        event1.wait(stream1)
        mm = torch.mm(both, in4)
        event2.record()
        both.record_stream(stream1)
    other = torch.mm(in3, in4)
    with torch.npu.stream(stream2):
        event2.wait(stream2)
        add2 = torch.add(in3, in4)
    return add, mm, other, add2


def test_streams() -> None:
    given = [torch.randn(8, 8, dtype=torch.float16).npu() for _ in range(4)]
    run = compiled(on_two_streams)
    for _ in range(2):
        torch.testing.assert_close(run(*given), on_two_streams(*given))


def test_cores() -> None:
    def f(a: Any, b: Any) -> Any:
        with torch.npu.npugraph_ex.scope.limit_core_num(4, 5):
            inside = torch.mm(a, b)
        return inside, torch.mm(a, b)

    x = torch.randn(4, 4).npu()
    torch.testing.assert_close(compiled(f)(x, x), f(x, x))
    assert any("limit_core_num(4, 5)" in remark for remark in JOURNALS[-1].remarks)


def test_tensors_that_the_script_saves(tmp_path: Path) -> None:
    def f(x0: Any, x1: Any) -> Any:
        torch_npu.save_npugraph_tensor(x1, save_path="./test1.pt")
        square = torch.square(x0)
        torch_npu.save_npugraph_tensor(square, save_path="./test2.pt")
        return torch.mm(x0, torch.add(x1, square))

    x0, x1 = torch.randn(4, 4).npu(), torch.randn(4, 4).npu()
    torch.compile(f, backend="npugraph_ex")(x0, x1)
    assert torch.equal(torch.load("test1_device_0_0.pt").cpu(), x1.cpu())
    torch.testing.assert_close(torch.load("test2_device_0_0.pt").cpu(), x0.cpu().square())


def test_a_cached_method_with_objects_for_arguments(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Meta:
        data: Any
        is_prompt: bool

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            self.cached_prompt = torch.npu.npugraph_ex.inference.cache_compile(self.prompt)
            self.cached_decode = torch.npu.npugraph_ex.inference.cache_compile(self.decode)

        def forward(self, x: Meta, kv: list[Any]) -> Any:
            return self.cached_prompt(x, kv) if x.is_prompt else self.cached_decode(x, kv)

        def prompt(self, x: Meta, kv: list[Any]) -> Any:
            return self.linear(x.data) + self.linear(kv[0])

        def decode(self, x: Meta, kv: list[Any]) -> Any:
            return self.linear(x.data) - self.linear(kv[0])

    data = torch.randn(2, 2).npu()
    for model in (Model().npu(), Model().npu()):  # the second finds what the first has kept
        for is_prompt, method in ((True, model.prompt), (False, model.decode)):
            meta = Meta(data, is_prompt)
            torch.testing.assert_close(model(meta, [data]), method(meta, [data]))
        assert not model.cached_prompt.skipped and not model.cached_decode.skipped
    folders = {
        path.parent.name for path in tmp_path.glob(".torchair_cache/Model_dynamic*aclgraphcache*/*/compiled_module")
    }
    assert folders == {"prompt", "decode"}
    (file,) = tmp_path.glob(".torchair_cache/Model_dynamic*/prompt/compiled_module")
    text = torch.npu.npugraph_ex.inference.readable_cache(str(file), print_output=False, file="prompt.py")
    assert Path("prompt.py").read_text().strip() == text.strip() and "prompt" in text


@pytest.mark.parametrize("option", ["static_kernel_compile", "super_kernel_optimize", "deadlock_check"])
def test_options_of_the_chip(option: str) -> None:
    assert compiled(lambda x: x + 1, **{option: True})(twos(2)).tolist() == [3, 3]
    assert any(option in remark for remark in JOURNALS[-1].remarks)


@pytest.mark.parametrize("on", [True, False])
def test_writes_in_place(on: bool) -> None:
    """A cache that is written to, and ops in between that can be written in place: the same with and without the passes."""

    def f(cache: Any, x: Any) -> Any:
        cache.index_copy_(0, torch.tensor([1], device=cache.device), x)
        return torch.relu(cache + 1) * 2

    run = compiled(f, inplace_pass=on, input_inplace_pass=on)
    for n in range(3):
        mine, theirs = twos(3, 2), twos(3, 2)
        assert torch.equal(run(mine, twos(1, 2) + n), f(theirs, twos(1, 2) + n)) and torch.equal(mine, theirs)


def norms(x1: Any, x2: Any, gamma: Any) -> Any:
    y, _, total = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    quantised, scale = torch_npu.npu_dynamic_quant(y.flatten(0, 1))
    return quantised, scale.view(-1, 1), total


@pytest.mark.parametrize("on", [True, False])
def test_fusions_of_norms(on: bool, capfd: pytest.CaptureFixture[str]) -> None:
    npugraph_ex.logger.setLevel(logging.DEBUG)
    x = torch.randn(2, 3, 4).half().npu()
    run = compiled(norms, pattern_fusion_pass=on)
    torch.testing.assert_close(run(x, x, x[0, 0]), norms(x, x, x[0, 0]))
    after = (
        capfd.readouterr().out.rpartition("after fx graph optimization, graph is graph():")[2].partition("[DEBUG]")[0]
    )
    assert ("npu.npu_add_rms_norm_dynamic_quant.default" in after) == on, after


def test_a_fusion_of_ones_own(capfd: pytest.CaptureFixture[str]) -> None:
    """`x.abs() + y` becomes one op where the check allows it."""
    with FakeTensorMode():
        x, y = (torch.empty(2, 4, device="npu") for _ in range(2))
        torch.npu.npugraph_ex.register_replacement(
            search_fn=lambda x, y: torch.add(torch.abs(x), y),
            replace_fn=lambda x, y: torch.addcmul(y, torch.sign(x), x),
            example_inputs=(x, y),
            extra_check=lambda match: match.kwargs["x"].meta["val"].shape[-1] == 48,
        )
    npugraph_ex.logger.setLevel(logging.DEBUG)
    for size in (48, 32):
        a, b = torch.randn(2, size).npu(), torch.randn(2, size).npu()
        torch.testing.assert_close(compiled(lambda a, b: torch.add(torch.abs(a), b))(a, b), a.abs() + b)
        log = capfd.readouterr().out
        after = log.rpartition("after fx graph optimization, graph is graph():")[2].partition("[DEBUG]")[0]
        assert ("aten.addcmul.default" in after) == (size == 48), after


def test_tensors_of_the_whole_graph(tmp_path: Path) -> None:
    """A file for each input and each result, in a folder of the rank."""
    x = torch.randn(2, 2).npu()
    run = compiled(
        lambda x: (x + 1) * 2, dump_tensor_data=True, data_dump_dir=str(tmp_path), data_dump_stage="optimized"
    )
    run(x)
    folder = tmp_path / "worldsize1_global_rank0"
    names = {file.name for file in folder.rglob("*.pt")}
    assert {"arg0_1_device_0_0.pt", "add_device_0_0.pt", "mul_device_0_0.pt"} <= names, names
    (file,) = folder.rglob("add_device_0_0.pt")
    torch.testing.assert_close(torch.load(file).cpu(), x.cpu() + 1)


def test_the_options_a_pass_is_given() -> None:
    seen = []

    def look(gm: Any, inputs: Any, config: Any) -> None:
        seen.append((type(config).__name__, config.capture_limit, config.clone_input))

    compiled(lambda x: x + 1, post_grad_custom_post_pass=look, capture_limit=3, clone_input=False)(twos(2))
    assert seen == [("CompilerConfig", 3, False)]
