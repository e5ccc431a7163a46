"""The kernels of the CUDA engine on a machine without a GPU: Triton's interpreter runs them with NumPy, on CPU tensors.

Triton is no dependency of airgraph. Where it is not installed, what needs it is skipped.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():  # where there is a GPU, other tests of the same process compile kernels for it
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported


def needs_interpreter():
    """Skips the tests of a module that cannot be run here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.sum, InterpretedFunction):
        pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)


TORCH_NAMES = {"nearbyint": "round", "pow": "pow", "atan2": "atan2"}


class Library:
    """libdevice's functions by PyTorch's, one tile at a time."""

    def __getattr__(self, name):
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, TORCH_NAMES.get(name, name))

        def apply(*tiles):
            tiles = [*tl.broadcast(*tiles)] if len(tiles) == 2 else tiles
            arrays = [torch.from_numpy(t.handle.data.copy()) for t in tiles]
            result = function(*arrays).numpy()
            return tl.tensor(TensorHandle(result, tiles[0].handle.dtype), tiles[0].type)

        return apply


def function_of(text):
    """A rendered kernel, interpreted."""
    from airgraph.engine.cuda import helpers
    from airgraph.engine.cuda.triton_build import jit_function

    helpers.libdevice = Library()
    patch_index()
    return jit_function(text)


def patch_index():
    """A size as the bound of a loop: the interpreter holds it as an array of one element, which NumPy 2 makes no int."""
    from triton.runtime import interpreter

    original = getattr(interpreter._patch_lang_tensor, "original", interpreter._patch_lang_tensor)

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.original = original
    interpreter._patch_lang_tensor = patched


class InterpretedKernels:
    """Stands in for compile.DriverKernels."""

    def __init__(self):
        self.sources = []

    def prepare(self, sources):
        self.sources += sources

    def bind(self, source, sizes, grid, wide):
        import triton.language as tl

        kernel = function_of(source.text)
        index = {"INDEX": tl.int64 if wide else tl.int32} if "INDEX" in source.text else {}

        def run(tensors):
            if grid:
                kernel[(grid,)](*tensors, *sizes, **index, **source.constants, EARLY=False)

        return run
