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


def rotate(x: Any, sin: Any, cos: Any, offset: int, interleaved: bool) -> Array:
    """Rotates the columns of one head of one token, in float32; sin and cos of its position."""
    x, y = np.asarray(x), np.array(x)
    s, c, dim = wide(sin), wide(cos), len(sin)
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        first, second = wide(x[offset + a]), wide(x[offset + b])
        y[offset + a] = (first * c[a] - second * s[a]).astype(x.dtype)
        y[offset + b] = (second * c[b] + first * s[b]).astype(x.dtype)
    return y


def rotary(
    qkv: Any, sin: Any, cos: Any, kv_heads: int, starts: Any, lengths: Any, offset: int = 0, interleaved: bool = False
) -> Array:
    """Rotates the heads of queries and keys of padded (B, L, H, D) or packed (T, H, D) tokens."""
    out = np.array(qkv)
    rows = [out[b] for b in range(len(lengths))] if out.ndim == 4 else np.split(out, np.cumsum(lengths)[:-1])
    for tokens, start, length in zip(rows, starts, lengths, strict=True):
        for t in range(length):
            for h in range(tokens.shape[1] - kv_heads):
                tokens[t, h] = rotate(tokens[t, h], sin[start + t], cos[start + t], offset, interleaved)
    return out


def store(cache: Any, rows: Any, table: Any, ids: Any, past: Any, lengths: Any, scale: Any = None) -> Array:
    """Writes rows, (B, L, K, D) or packed (T, K, D), into a cache (blocks, K, size, D)."""
    cache, rows = np.array(cache), np.asarray(rows)
    ends = np.cumsum(lengths)
    for b, (slot, start, length) in enumerate(zip(ids, past, lengths, strict=True)):
        own = rows[b, :length] if rows.ndim == 4 else rows[ends[b] - length : ends[b]]
        for i, row in enumerate(own):
            place = start + i
            if scale is not None:
                row = np.clip(np.rint(wide(row) / wide(scale)), -127, 127).astype(np.int8)
            cache[table[slot][place // cache.shape[2]], :, place % cache.shape[2]] = row
    return cache
