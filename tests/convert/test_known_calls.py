"""Which calls a file may name."""

import pytest
import torch

from airgraph.convert.known_calls import FUNCTIONS, refusal, target_refusal


def call(target, args=(), inputs=1, **kwargs):
    return refusal({"target": target, "args": list(args), "kwargs": kwargs}, inputs)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.roll.default", ["%0", [1], [0]]),
        ("aten.empty.memory_format", [["%0", 2]]),
        ("aten.rand.generator", [[2], None]),
        ("prims.convert_element_type.default", ["%0", "@torch.float32"]),
        ("operator.floordiv", ["%0", 2]),
        ("torch.sym_max", ["%0", 2]),
        ("aten.add.Tensor", ["%0", "@complex:1.0:nan"]),
        ("aten._assert_scalar.default", ["%0", "\\@kept: is text here"]),
        ("aten.to.dtype_layout", ["%0", "@torch.half", "@torch.strided", "@device:cuda:0"]),
    ],
)
def test_ops_of_tensors_and_numbers(target, args):
    assert call(target, args) is None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("builtins.eval", "builtins.eval is not an op of aten, npu, prims, _c10d_functional"),
        ("builtins.__import__", "builtins.__import__ is not an op of"),
        ("operator.attrgetter", "operator.attrgetter is not an op of"),
        ("operator.methodcaller", "is not an op of"),
        ("torch.load", "torch.load is not an op of"),
        ("math.__loader__.load_module", "is not an op of"),
        ("os.system", "is not an op of"),
        ("higher_order.cond", "higher_order.cond runs sub-graphs, which are not kept"),
        ("@kept:function_0", "it calls a function or uses an object of this process, which no file can hold"),
        ("aten.from_file.default", "aten.from_file.default reads and writes files"),
        ("aten.no_such_op.default", "there is no op aten.no_such_op.default here"),
        ("aten.__class__.default", "there is no op"),
        ("aten.relu.__call__", "there is no op"),
        ("aten.relu", "there is no op"),
        ("aten.set_.source_Storage", "aten.set_.source_Storage takes a Storage"),
        ("aten.append.t", "aten.append.t takes a List[t]"),
        ("", "is not an op of"),
        (7, "7 is not the name of an op"),
    ],
)
def test_anything_else_is_refused(target, reason):
    assert reason in call(target, ["%0"])


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["%1"], "it has no input %1"),
        (["%-1"], "it has no input %-1"),
        (["%99999999999"], "it has no input"),
        (["@kept:tensor_0"], "it uses an object of this process"),
        (["@op:builtins.exec"], "builtins.exec is not an op of"),
        ([{"a": ["@op:torch.load"]}], "torch.load is not an op of"),
        (["@torch.nn"], "'@torch.nn' is not a type of PyTorch's"),
        (["@load"], "'@load' is not a type of PyTorch's"),
        (["@torch.float32:0"], "is not a type of PyTorch's"),
        (["@device:/etc/passwd"], "is not a device"),
        (["@complex:1"], "is no number"),
        ([object()], "an argument is a object"),
    ],
)
def test_arguments_that_are_no_data(args, reason):
    assert reason in call("aten.relu.default", args)


def test_the_functions_of_python_are_there():
    """A name that this version of PyTorch does not have would be found out only by a reader."""
    import builtins
    import math
    import operator

    modules = {"builtins": builtins, "math": math, "operator": operator, "torch": torch}
    for name in FUNCTIONS:
        module, _, leaf = name.partition(".")
        assert callable(getattr(modules[module], leaf)), name


def test_nearly_every_op_of_aten_counts():
    names = [n.replace("::", ".", 1) for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    names = [n if n.count(".") == 2 else f"{n}.default" for n in names]
    assert sum(target_refusal(name) is None for name in names) > 0.95 * len(names)
