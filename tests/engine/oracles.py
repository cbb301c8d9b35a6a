"""The operators of an inference engine in NumPy: exact integers, and float32 steps in the order of the docstrings."""

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
F32 = np.float32
BF16 = ml_dtypes.bfloat16


def wide(x: Any) -> Array:
    return np.asarray(x).astype(F32)


def flushed(x: Any) -> Array:
    """XLA computes with zeros in place of subnormal numbers on a CPU."""
    return np.where(np.abs(wide(x)) < F32(2.0**-126), F32(0), wide(x))


def quantize(x: Any, smooth: Any = None) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        h = flushed(x) if smooth is None else flushed(flushed(x) * flushed(smooth))
        scale = np.abs(h).max(-1, initial=0) / F32(127)
        scale = np.where(scale < F32(2.0**-126), F32(2.0**-126), scale)
        finite = np.isfinite(scale)
        y = np.where(finite[..., None], np.rint(h / scale[..., None]), F32(0)).astype(np.int8)
        return y, np.where(finite, scale, F32(np.nan))


def quantized_product(x: Any, w: Any, row: Any, column: Any, bias: Any = None, dtype: Any = BF16) -> Array:
    total = np.asarray(x).astype(np.int64) @ np.asarray(w).astype(np.int64)
    with np.errstate(all="ignore"):
        y = total.astype(F32) * wide(row)[:, None] * wide(column)
        return (y if bias is None else y + wide(bias)).astype(dtype)


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6) -> Array:
    h = np.asarray(x).astype(np.float64)
    y = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * np.asarray(weight).astype(np.float64)
