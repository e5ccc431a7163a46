"""A sample of `tests/opinfo/npu.py` for every day: what is special about an op on the emulated device, one of each kind."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "opinfo"))
import npu
from opinfo import Different, all_ops

from airgraph.errors import CompatError

PAIRS = [
    ("add", "float32"),  # one kernel; in place; out=
    ("add", "int64"),
    ("arange", "int64"),  # made on the device
    ("as_strided", "float32"),  # views
    ("bernoulli", "float32"),  # random numbers
    ("index_put", "float32"),  # writes
    ("linalg.cholesky", "float32"),  # out= of which PyTorch fills the others itself
    ("linalg.lu", "float32"),
    ("matmul", "bfloat16"),
    ("mode", "float32"),  # asks for a device it knows
    ("nn.functional.conv2d", "float32"),
    ("nn.functional.layer_norm", "float32"),
    ("nn.functional.rms_norm", "float16"),
    ("nn.functional.scaled_dot_product_attention", "float32"),
    ("sort", "float32"),
    ("split", "bool"),
    ("tensor_split", "float32"),  # takes a tensor of the CPU
    ("where", "bool"),
]


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_sample(name, dtype):
    outcome = npu.run_pair(name, all_ops()[name], dtype)
    assert outcome.status == "pass", (
        f"{outcome.status}: {outcome.detail}\n    python tests/opinfo/opinfo.py --npu --dtypes {dtype} {name}"
    )


def test_sparse_tensors_are_refused():
    outcome = npu.run_pair("to_sparse", all_ops()["to_sparse"], "bfloat16")
    assert (outcome.status, outcome.detail) == (
        "fail",
        "function: CompatError: the emulated npu holds dense tensors only, not torch.sparse_coo",
    )
    row = torch.tensor([[0], [0]])
    for make in (
        lambda: torch.sparse_coo_tensor(row.npu(), torch.ones(1).npu(), (3, 3)),
        lambda: torch.zeros(3, 3, layout=torch.sparse_coo, device="npu"),
        lambda: torch.eye(3).to_sparse_csr().npu() @ torch.eye(3).npu(),
    ):
        with pytest.raises(CompatError, match=r"holds dense tensors only, not sparse\n  op: "):
            make()


def test_quantised_and_nested_tensors_are_refused():
    with pytest.raises(CompatError, match="holds dense tensors only, not quantised"):
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).npu()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="npu")
    with pytest.raises(CompatError, match="holds dense tensors only, not nested"):
        nested.to("npu", torch.float64)


def test_jagged_tensors_work():
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).npu()
    assert jagged.device.type == "npu"
    assert (jagged * 2).sum(-1).values().tolist() == [8.0] * 5


# -- what the comparison sees ---------------------------------------------------------------------------------------
class FakeOp:
    """An op that gives another answer on npu."""

    name, op, supports_out, inplace_variant = "fake", None, False, None

    def __init__(self, on_cpu, on_npu):
        self.functions = {"cpu": on_cpu, "npu": on_npu}

    def __call__(self, x):
        return self.functions[x.device.type](x)


class Sample:
    input, args, kwargs, broadcasts_input = torch.arange(6.0).view(2, 3), (), {}, False


def zeros_but(sign):
    return lambda x: torch.zeros(2, device=x.device) * sign


@pytest.mark.parametrize(
    ("on_cpu", "on_npu", "problem"),
    [
        (lambda x: x + 1, lambda x: x + 2, "result 0: other values"),
        (zeros_but(1), zeros_but(-1), "result 0: other values"),
        (lambda x: x + 1, lambda x: (x + 1).cpu(), "result 0: on cpu"),
        (lambda x: x + 1, lambda x: (x + 1).double(), "result 0: type torch.float64"),
        (lambda x: x + 1, lambda x: (x.t() + 1).contiguous().t(), "result 0: strides"),
        (lambda x: x[1:], lambda x: x[1:].clone(), "result 0: offset 0 instead of 3"),
        (lambda x: x.view(-1), lambda x: x.view(-1).clone(), "memory: "),
        (lambda x: x + 1, lambda x: x.add_(1).clone(), "argument 0: other values"),
        (lambda x: x * 1, lambda x: x.mul_(1).clone(), "arguments written: [True] instead of [False]"),
        (lambda x: x, lambda x: x.view(2, 3), "memory: "),
    ],
)
def test_the_comparison_sees(on_cpu, on_npu, problem):
    op = FakeOp(on_cpu, on_npu)
    same = FakeOp(on_cpu, on_cpu)
    expected = npu.run(op, op, Sample, "cpu", backward=False)
    npu.check(same, same, Sample, False, expected)
    with pytest.raises(Different) as found:
        npu.check(op, op, Sample, False, expected)
    assert problem in str(found.value)
