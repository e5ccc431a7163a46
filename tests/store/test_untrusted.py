"""Files are data: whatever they state, reading them runs nothing and running them touches no memory but their own."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import forked
import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import FloorDiv

import airgraph
from airgraph.errors import AirgraphError, BindError, ExportError, VerifyError
from airgraph.ir.stored import EXTRA
from airgraph.ir.symbols import evaluate
from airgraph.ir.text import from_py
from airgraph.store.air_file import read_air, write_air
from airgraph.tools.show import show

sys.path.insert(0, str(Path(__file__).parent))
import fuzz


@pytest.mark.slow
def test_mutants(tmp_path):
    fuzz.export_all(tmp_path)
    found = fuzz.run(300, 0, tmp_path)
    assert len(found) == 300 and not fuzz.failures(found)
    assert list(found.values()).count("as the reference engine") > 20  # they are not all refused


def test_a_hang_is_told_by_cpu_time():
    spin = "import sys; sys.path.insert(0, sys.argv[1]); import fuzz; fuzz.allow(1)\nwhile True: pass"
    assert forked.run("-c", spin, str(Path(fuzz.__file__).parent)).returncode == -signal.SIGXCPU


# -- dumps ----------------------------------------------------------------------------------------------------------
EVIL = "__import__('os').system('touch {}')"
LINES = (
    'x_0 = ge.Data(index=0, dtype=0, shape=["{}"], placement="NPU", node_name="x")',
    'x_0 = ge.Data(index=0, dtype=9, shape=[], placement="NPU", node_name="x", known="{}")',
    'y_0 = ge.Reshape(ge.Const([1, 2], dtype=0), ["{}"])',
    'y_0 = ge.Fill(ge.Const("{}", dtype=9), 1.0)',
    'y_0 = ge.ReduceSum(ge.Const([1, 2], dtype=0), [0], keep_dims="{}")',
    'y_0 = ge.AtenCall([], target="aten.ones.default", args=[[2]], types=[[0, ["{}"], "CPU"]])',
)


@pytest.mark.parametrize("line", LINES)
def test_a_dump_runs_no_text(line, tmp_path):
    proof = tmp_path / "proof"
    text = line.format(EVIL.format(proof)) + "\nz_0 = ge.Mul(x_0, 2)" * ("x_0" in line)
    with pytest.raises(VerifyError):
        from_py(text)
    assert not proof.exists()


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 5000, "x = ge.Data(**{})", "x = ge.Mul(1 if 2 else 3)", "x = ge.node(1)"]
)
def test_a_dump_that_is_none(text):
    with pytest.raises(VerifyError):
        from_py(text)


# -- sizes that are stated and not true -----------------------------------------------------------------------------
def exported(tmp_path, dynamic):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).eval()
    return model, airgraph.export(model, (torch.randn(3, 4),), path=str(tmp_path), dynamic=dynamic)


def rewritten(air, change):
    message = read_air(air)
    change(message, {op.name: op for op in message.graph[0].op})
    write_air(air, message)
    return air


def shorter(message, ops):
    """The LayerNorm's weight has half of its elements, consistently."""
    op = next(op for op in ops.values() if EXTRA in op.attr and b'"1.weight"' in op.attr[EXTRA].s)
    op.output_desc[0].shape.dim[0] = 3
    op.attr["value"].t.desc.shape.dim[0] = 3
    op.attr["value"].t.data = op.attr["value"].t.data[:12]


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_operands_fit_their_op(tmp_path, engine):
    _, air = exported(tmp_path, dynamic=False)
    rewritten(air, shorter)
    with pytest.raises(AirgraphError, match=r"normalized_shape|weight"):
        airgraph.load_export(air, engine=engine)(torch.randn(3, 4))


def test_a_bias_has_an_element_for_each_channel(tmp_path):
    def change(message, ops):
        conv = next(op for op in ops.values() if op.type == "Conv2D")
        conv.input[2] = conv.input[1]

    air = airgraph.export(torch.nn.Conv2d(2, 4, 3).eval(), (torch.randn(1, 2, 8, 8),), path=tmp_path / "conv")
    with pytest.raises(AirgraphError, match=r"bias of .* has the shape \[4, 2, 3, 3\], for 4 channels"):
        airgraph.load_export(rewritten(air, change), engine="native")


def test_operands_fit_at_every_size(tmp_path):
    _, air = exported(tmp_path, dynamic=True)
    ours = airgraph.load_export(rewritten(air, shorter), engine="native")
    with pytest.raises(BindError, match=r"states sizes that its ops do not have with s\d+ = 3: LayerNorm\w* failed"):
        ours(torch.randn(3, 4))


def test_a_symbol_that_is_another_size(tmp_path):
    def change(message, ops):
        op = next(op for op in ops.values() if op.type == "MatMulV2")
        extra = json.loads(op.attr[EXTRA].s)
        symbol = extra["shapes"][0][0]["expr"]
        extra["shapes"][0][0]["expr"] = ["Mul", 3, symbol]
        op.attr[EXTRA].s = json.dumps(extra).encode()

    _, air = exported(tmp_path, dynamic=True)
    ours = airgraph.load_export(rewritten(air, change), engine="native")
    with pytest.raises(BindError, match=r"MatMulV2:0 has the shape \[3, 6\], not \[9, 6\] as stated"):
        ours(torch.randn(3, 4))


def test_a_number_is_what_its_argument_gives(tmp_path):
    """A native kernel read the bits of a float argument as an integer where the file did not say that it is a number."""
    air = airgraph.export(fuzz.Calls(lambda m, x, k: x * k), (torch.randn(3), 2.5), path=str(tmp_path), dynamic=True)

    def change(message, ops):
        for op in ops.values():
            extra = json.loads(op.attr[EXTRA].s) if op.type == "Data" and EXTRA in op.attr else {}
            if extra.get("known"):
                op.attr[EXTRA].s = json.dumps({**extra, "known": []}).encode()

    with pytest.raises(AirgraphError, match="is stated to be None"):
        airgraph.load_export(rewritten(air, change), engine="native")(torch.randn(3), 2.5)


def test_strides_that_lose_values(tmp_path):
    _, air = exported(tmp_path, dynamic=False)

    def change(message, ops):
        described = json.loads(message.attr["_airgraph"].s)
        described["arguments"][-1]["strides"][-1] = 0
        message.attr["_airgraph"].s = json.dumps(described).encode()

    ours = airgraph.load_export(rewritten(air, change), engine="native")
    with pytest.raises(BindError, match=r"was an expanded tensor when .* was exported; now its elements differ"):
        ours(torch.randn(3, 4))


def test_a_result_has_a_stride_for_each_dimension(tmp_path):
    _, air = exported(tmp_path, dynamic=False)

    def change(message, ops):
        described = json.loads(message.attr["_airgraph"].s)
        shape, strides, _ = described["results"][0]["layout"]
        shape.append(1)
        strides.append(1)
        message.attr["_airgraph"].s = json.dumps(described).encode()

    with pytest.raises(AirgraphError, match="output 0 has 2 dimensions, and its result 3 strides"):
        airgraph.load_export(rewritten(air, change), engine="native")


def test_a_constant_has_the_type_of_its_output(tmp_path):
    air = airgraph.export(fuzz.Calls(lambda m, x: x.sum((0, 1))), (torch.randn(2, 3),), path=str(tmp_path))

    def change(message, ops):
        next(op for op in ops.values() if op.type == "Const").output_desc[0].shape.dim[0] = 2000

    with pytest.raises(ExportError, match="its value has another type than its output"):
        airgraph.load_export(rewritten(air, change))


def test_statistics_are_floating_point(tmp_path):
    """PyTorch's kernel refuses whole numbers, and so does native code."""
    model = nn.BatchNorm2d(3).eval()

    def change(message, ops):
        op = next(op for op in ops.values() if EXTRA in op.attr and b'"running_mean"' in op.attr[EXTRA].s)
        op.output_desc[0].dtype = op.attr["value"].t.desc.dtype = 7  # int32 in the protobuf message

    air = airgraph.export(model, (torch.randn(2, 3, 4, 4),), path=str(tmp_path))
    with pytest.raises(ExportError, match=r"mean of BNInfer is torch.int32, not floating-point"):
        airgraph.load_export(rewritten(air, change), engine="native")


def test_an_expression_that_divides_by_zero():
    s0 = sympy.Symbol("s0", integer=True)
    with pytest.raises(VerifyError, match=r"has no value with s0 = 0"):
        evaluate(sympy.Eq(FloorDiv(8, s0), 2), {s0: 0})


def test_a_write_has_no_value(tmp_path):
    def change(message, ops):
        ops["NetOutput"].input[0] = next(name for name in ops if name.startswith("Assign")) + ":0"

    model = fuzz.Calls(lambda m, x: m.seen.add_(1) * x.sum(), seen=torch.zeros(2))
    model.seen.requires_grad_(False)
    air = airgraph.export(model, (torch.randn(2),), path=str(tmp_path))
    for trust in (False, True):
        with pytest.raises(ExportError, match="writes to an argument, and Assign:0 is read as a value"):
            airgraph.load_export(rewritten(air, change), trust=trust)


def test_a_file_of_ones_own_is_not_rehearsed(tmp_path):
    model, air = exported(tmp_path, dynamic=True)
    trusted = airgraph.load_export(air, engine="native", trust=True)
    checked = airgraph.load_export(air, engine="native")
    assert trusted.rehearse is None and checked.rehearse is not None
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(checked(x), model(x))
        torch.testing.assert_close(trusted(x), model(x))


def test_sizes_that_only_running_tells(tmp_path):
    model, x = fuzz.Calls(lambda m, x: x[x > 0] * 2), torch.randn(9)
    ours = airgraph.load_export(airgraph.export(model, (x,), path=str(tmp_path)), engine="native")
    assert ours.rehearse is None
    remarks = airgraph.journal.JOURNALS[-1].remarks
    assert any("the reference engine runs it, since its sizes cannot be checked before" in r for r in remarks)
    torch.testing.assert_close(ours(x), model(x))


@pytest.mark.parametrize(
    ("run", "args", "op"),
    [
        (
            lambda m, x, n: torch.segment_reduce(x, "sum", offsets=n),
            (torch.randn(5, 2), torch.tensor([0, 5])),
            "segment_r",
        ),
        (
            lambda m, i, v: torch.ops.aten._sparse_coo_tensor_unsafe(i, v, [4, 4]).to_dense(),
            (torch.tensor([[0, 1], [1, 2]]), torch.ones(2)),
            "_sparse_coo_tensor",
        ),
        (
            lambda m, dy, x, i: torch.ops.aten.max_pool2d_with_indices_backward(
                dy, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i
            ),
            (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 1, 1, dtype=torch.int64)),
            "MaxPoolGrad",
        ),
    ],
)
def test_ops_that_check_nothing_are_run_of_trusted_files_only(tmp_path, run, args, op):
    """With an index of 2**40 in place of these each of them ends the process."""
    model = fuzz.Calls(run)
    air = airgraph.export(model, args, path=str(tmp_path))
    with pytest.raises(ExportError, match=rf"calls (aten\.)?{op}\w*.*, which does not check its operands"):
        airgraph.load_export(air)
    torch.testing.assert_close(airgraph.load_export(air, trust=True)(*args), model(*args))


# -- files ----------------------------------------------------------------------------------------------------------
def test_a_folder_of_weights_is_no_link(tmp_path):
    x = torch.randn(2, 4)
    air = airgraph.export(nn.Linear(4, 3), (x,), path=str(tmp_path / "a"), name="mp", rank=0, external_weights=True)
    (tmp_path / "a" / "rank_0").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "rank_0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="rank_0 is a symbolic link"):
        airgraph.load_export(air)


def test_sparse_files_are_refused(tmp_path):
    (tmp_path / "export.air").touch()
    os.truncate(tmp_path / "export.air", 2**30)
    with pytest.raises(ExportError, match=r"is sparse: it has 1,073,741,824 bytes and 0 on disk"):
        airgraph.load_export(tmp_path / "export.air")


KILLED = """
import os, signal, sys, torch, airgraph
from airgraph.store import export
torch.manual_seed(int(sys.argv[2]))
left = int(sys.argv[3])
real = os.replace
def replace(*args):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real(*args)
os.replace = replace
airgraph.export(torch.nn.Linear(4, 3), (torch.randn(2, 4),), path=sys.argv[1], external_weights=True)
"""


def test_an_export_that_is_killed_leaves_the_former_one(tmp_path):
    """At two of its four renames: after the first weight, and before the model itself."""
    folder, x = tmp_path / "m", torch.randn(2, 4)
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    air = airgraph.export(model, (x,), path=str(folder), external_weights=True)
    for left in (1, 3):
        done = forked.run("-c", KILLED, str(folder), "2", str(left))
        assert done.returncode == -signal.SIGKILL
        torch.testing.assert_close(airgraph.load_export(air)(x), model(x))
    torch.manual_seed(2)
    other = nn.Linear(4, 3)
    airgraph.export(other, (x,), path=str(folder), external_weights=True)
    torch.testing.assert_close(airgraph.load_export(air)(x), other(x))
    files = [f.name for f in folder.iterdir() if not f.name.startswith(".")]
    assert len(files) == 4 and "weight" not in files  # the former ones are gone


def test_show_escapes_what_a_terminal_acts_on(tmp_path, capsys):
    def change(message, ops):
        for op in ops.values():
            if op.type == "LayerNormV4":
                op.attr["_fx_code"].s = b"\x1b[2J cleared \xe2\x80\xae reversed"
            if EXTRA in op.attr and b'"0.weight"' in op.attr[EXTRA].s:
                op.attr[EXTRA].s = op.attr[EXTRA].s.replace(b"0.weight", b"a\\u001b[31m\\nb")

    _, air = exported(tmp_path, dynamic=False)
    show(str(rewritten(air, change)))
    text = capsys.readouterr().out
    assert "a\\x1b[31m\\nb" in text and "\\x1b[2J cleared \\u202e reversed" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    show(str(rewritten(air, change)), pbtxt=True)
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


@pytest.fixture(autouse=True)
def no_core_files():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_CORE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)
