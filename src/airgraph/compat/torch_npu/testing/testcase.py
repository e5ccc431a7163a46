"""`from torch_npu.testing.testcase import TestCase, run_tests`"""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np
import torch

# What may be off in float16 and in everything else, in absolute terms.
NEAR = {"float16": 1e-3}
SMALLEST = 6e-8  # half of a float16's smallest number: a denominator is never zero


class TestCase(unittest.TestCase):
    """unittest's, which also compares tensors and arrays."""

    def assertRtolEqual(
        self,
        x: Any,
        y: Any,
        prec: float = 1e-4,
        prec16: float = 1e-3,
        auto_trans_dtype: bool = False,
        message: str | None = None,
    ) -> None:
        """Equal up to `prec` (float16: `prec16`) of the larger one, or nearly zero apart, but for a few: as many of the
        elements as `prec` says. Lists and tuples are compared one by one."""
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            self.assertEqual(len(x), len(y), message)
            for a, b in zip(x, y):
                self.assertRtolEqual(a, b, prec, prec16, auto_trans_dtype, message)
            return
        left, right = _array(x), _array(y)
        if auto_trans_dtype:
            left, right = left.astype(np.float32), right.astype(np.float32)
        if left.shape != right.shape:
            self.fail(message or f"shape error: {left.shape} and {right.shape}")
        if left.dtype != right.dtype:
            self.fail(message or f"dtype error: {left.dtype} and {right.dtype}")
        if left.dtype.kind in "biu":
            wrong, allowed = int((left != right).sum()), 0.0
        else:
            half = left.dtype == np.float16
            allowed = (prec16 if half else prec) * left.size
            wrong = _far_apart(left, right, prec16 if half else prec, NEAR.get(left.dtype.name, 1e-4))
        if wrong > allowed:
            self.fail(message or f"result error: {wrong} of {left.size} elements are too far apart")

    def assertEqual(self, first: Any, second: Any, *args: Any, **kwargs: Any) -> None:
        """Tensors by torch.testing, with `rtol=` and `atol=` as there; everything else by unittest."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            tolerances = {name: kwargs[name] for name in ("rtol", "atol") if name in kwargs}
            torch.testing.assert_close(first.cpu(), second.cpu(), equal_nan=True, **tolerances)
            return
        kwargs = {name: value for name, value in kwargs.items() if name not in ("rtol", "atol")}
        super().assertEqual(first, second, *args, **kwargs)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def _far_apart(left: np.ndarray, right: np.ndarray, part: float, near: float) -> int:
    a, b = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (left, right))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
        close = (difference <= near) | (difference <= part * (np.maximum(np.abs(a), np.abs(b)) + SMALLEST))
    return int((~(same | close)).sum())


def run_tests(*args: Any, **kwargs: Any) -> None:
    """Run the tests of the script."""
    unittest.main(*args, **kwargs)
