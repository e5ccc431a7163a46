"""Ops written in C++ with TORCH_LIBRARY_IMPL(…, PrivateUse1, …): in every compiled graph they run as in eager."""

import shutil

import pytest
import torch
import torch_npu  # noqa: F401
import torchair
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor twice(const at::Tensor& x) {
  TORCH_CHECK(x.device().type() == c10::DeviceType::PrivateUse1, "not on the device");
  return x + x;
}

at::Tensor& grow(at::Tensor& x, double by) { return x.add_(by); }

TORCH_LIBRARY(written_in_cpp, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("grow_(Tensor(a!) x, float by) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(written_in_cpp, PrivateUse1, m) {
  m.impl("twice", &twice);
  m.impl("grow_", &grow);
}

TORCH_LIBRARY_IMPL(written_in_cpp, Meta, m) {
  m.impl("twice", [](const at::Tensor& x) { return at::empty_like(x); });
  m.impl("grow_", [](at::Tensor& x, double) -> at::Tensor& { return x; });
}
"""
pytestmark = [
    pytest.mark.slow,  # a C++ compiler runs
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="needs g++ and ninja"),
]


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cpp"))
    load_inline("written_in_cpp", SOURCE, extra_cflags=["-O0"], is_python_module=False, build_directory=folder)


def function(x, y):
    return torch.ops.written_in_cpp.twice(x) * 3, torch.ops.written_in_cpp.grow_(y, 2.0) + 1


@pytest.mark.parametrize("backend", ["airgraph", "npugraphs", "npugraph_ex", "npu"])
def test_every_backend(backend):
    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.arange(4.0, device="npu")
    mine, eagers = (torch.ones(4, device="npu") for _ in range(2))
    for _ in range(3):
        torch.testing.assert_close(run(x, mine), function(x, eagers))
        torch.testing.assert_close(mine, eagers)


def test_with_a_converter():
    """The graph has the op's own name, and the kernel computes it."""
    twice = torch.ops.written_in_cpp.twice.default
    torchair.register_fx_node_ge_converter(twice)(lambda x, meta_outputs=None: torchair.ge.custom_op("Twice", x))
    torch._dynamo.reset()
    run = torch.compile(lambda x: twice(x) + 1, backend=torchair.get_npu_backend(), fullgraph=True)
    x = torch.arange(4.0, device="npu")
    assert run(x).tolist() == [1.0, 3.0, 5.0, 7.0]
