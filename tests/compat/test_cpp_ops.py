"""Ops that a C++ library registers for the device (`TORCH_LIBRARY_IMPL(…, PrivateUse1, …)`), in every compiled graph."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401
import torchair
from torch.utils import cpp_extension

from airgraph.convert import REGISTRY

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
using at::Tensor;

void need_npu(const Tensor& x) { TORCH_CHECK(x.is_privateuseone(), "a tensor on ", x.device()); }

Tensor scale(const Tensor& x, const Tensor& y, double by) {
  need_npu(x), need_npu(y);
  return x.mul(y).mul(by);
}
Tensor scale_meta(const Tensor& x, const Tensor& y, double by) { return at::empty_like(x); }

void add_to(Tensor x, const Tensor& y) {
  need_npu(x), need_npu(y);
  x.add_(y);
}
void add_to_meta(Tensor x, const Tensor& y) {}

TORCH_LIBRARY(cpp_ops, m) {
  m.def("scale(Tensor x, Tensor y, float by) -> Tensor");
  m.def("add_to(Tensor(a!) x, Tensor y) -> ()");
}
TORCH_LIBRARY_IMPL(cpp_ops, PrivateUse1, m) { m.impl("scale", &scale), m.impl("add_to", &add_to); }
TORCH_LIBRARY_IMPL(cpp_ops, Meta, m) { m.impl("scale", &scale_meta), m.impl("add_to", &add_to_meta); }
"""


class Scale(torch.autograd.Function):
    """The gradient of `scale`, by the op itself: it is registered for the device alone, too."""

    @staticmethod
    def forward(ctx, x, y, by):
        ctx.save_for_backward(x, y)
        ctx.by = by
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.cpp_ops.scale(x, y, by)

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        scale = torch.ops.cpp_ops.scale
        return scale(gradient, y, ctx.by), scale(gradient, x, ctx.by), None


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    """The library, built once, in a temporary folder; its ops stay in the process."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("cpp_ops")
    (folder / "ops.cpp").write_text(SOURCE)
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", *includes, "ops.cpp", "-o", "ops.so", *libraries]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], cwd=folder, check=True)
    torch.ops.load_library(folder / "ops.so")
    gradients = torch.library.Library("cpp_ops", "IMPL", "AutogradPrivateUse1")
    gradients.impl("scale", lambda x, y, by: Scale.apply(x, y, by))
    yield torch.ops.cpp_ops
    gradients._destroy()


def torchair_backend(folder: Path, mode: str = "max-autotune"):
    config = torchair.CompilerConfig()
    config.mode = mode
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(folder)
    return torchair.get_npu_backend(compiler_config=config)


def check(function, backend, *, trains=False):
    """Results, writes and gradients of three calls are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(3):
        wanted, given = ([torch.linspace(-1, i, 12).reshape(3, 4).npu() for i in (2, 3)] for _ in range(2))
        for tensor in (*wanted, *given):
            tensor.requires_grad_(trains)
        expected, result = function(*wanted), compiled(*given)
        assert result.device == expected.device
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(given, wanted)
        if trains:
            expected.sum().backward()
            result.sum().backward()
            torch.testing.assert_close([x.grad for x in given], [x.grad for x in wanted])


@pytest.mark.parametrize("backend", ["airgraph", "npugraphs", "npugraph_ex", "max-autotune", "reduce-overhead"])
def test_every_backend(ops, backend, tmp_path):
    def forward(x, y):
        return ops.scale(x + 1, y, 3.0) * 2

    def written(x, y):
        z = x * 2
        ops.add_to(z, y)
        ops.add_to(x, z)
        return z + 1

    def trained(x, y):
        return ops.scale(x * 2, y, 3.0).sin()

    compiler = torchair_backend(tmp_path, backend) if "-" in backend else backend
    check(forward, compiler)
    check(written, compiler)
    check(trained, compiler, trains=True)


def test_with_converters(ops, tmp_path, monkeypatch):
    """Dumps have the converters' GE ops, of the forward and of the backward graph, and the C++ kernels compute."""
    monkeypatch.setattr(REGISTRY, "converters", dict(REGISTRY.converters))

    @torchair.register_fx_node_ge_converter(ops.scale.default)
    def convert_scale(x, y, by, meta_outputs=None):
        by = torchair.ge.attr.Float(by)
        return torchair.ge.custom_op("Scale", inputs={"x": x, "y": y}, attrs={"by": by}, outputs=["z"])

    @torchair.register_fx_node_ge_converter(ops.add_to.default)
    def convert_add_to(x, y, meta_outputs=None):
        return torchair.ge.custom_op("AddTo", inputs={"x": x, "y": y}, outputs=["x"])

    def written(x, y):
        ops.add_to(x, y)
        return ops.scale(x, y, 3.0)

    check(written, torchair_backend(tmp_path))
    check(lambda x, y: ops.scale(x, y, 2.0).sin(), torchair_backend(tmp_path), trains=True)
    dumps = sorted(tmp_path.glob("dynamo_original*"), key=lambda path: int(re.findall(r"graph_(\d+)", path.name)[0]))
    found = [re.findall(r'ge\.custom_op\("(\w+)"|AtenCall', path.read_text()) for path in dumps]
    assert found == [["AddTo", "Scale"], ["Scale"], ["Scale", "Scale"]]


def test_the_host_still_has_no_kernel(ops):
    with pytest.raises(NotImplementedError, match=r"Could not run 'cpp_ops::scale'.*'CPU' backend"):
        ops.scale(torch.ones(2), torch.ones(2), 1.0)
