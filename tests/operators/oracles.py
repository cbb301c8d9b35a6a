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
    """XLA computes with zeros instead of subnormal numbers on a CPU."""
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
    out, sin, cos = np.array(qkv), np.asarray(sin), np.asarray(cos)
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


def topk(scores: Any, k: int) -> tuple[Array, Array]:
    """Returns the experts with the largest scores, lower ones first of equal ones, and their softmax in float64."""
    scores = np.asarray(scores).astype(np.float64)
    selected = np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int32)
    e = np.exp(np.take_along_axis(scores, selected, -1) - scores.max(-1, keepdims=True, initial=-np.inf))
    return selected, e / e.sum(-1, keepdims=True)


def scatter(selected: Any, first: int, end: int, allocated: int) -> tuple[Array, Array]:
    """Returns token * topk + place of each row, and the rows of each expert."""
    places = [
        [t * len(row) + k for t, row in enumerate(np.asarray(selected)) for k, e in enumerate(row) if e == expert]
        for expert in range(first, end)
    ]
    offset = np.full(allocated, -1, np.int32)
    flat = [p for own in places for p in own]
    offset[: len(flat)] = flat
    return offset, np.array([len(own) for own in places], np.int32)


def gather(rows: Any, offset: Any, weights: Any, shared: int, first: int, per_rank: int, dtype: Any) -> Array:
    rows, weights = np.asarray(rows), wide(weights)
    tokens, topk = weights.shape
    total: Array = np.zeros((tokens, rows.shape[1]), F32)
    place = {int(o): shared * per_rank + i for i, o in enumerate(np.asarray(offset)) if o >= 0}
    for t in range(tokens):
        for k in range(topk):
            if t * topk + k in place:
                total[t] += wide(rows[place[t * topk + k]]) * weights[t, k]
    for s in range(shared):
        total[first : first + per_rank] += wide(rows[s * per_rank : (s + 1) * per_rank])
    return total.astype(dtype)


def swiglu(x: Any) -> Array:
    gate, up = np.split(np.asarray(x).astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def attend(q: Any, keys: Any, values: Any, first: int) -> Array:
    """Returns the results of queries (T, N, D) at positions from `first` on, which see keys (S, K, D) up to theirs."""
    q, keys, values = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
    keys, values = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    out = np.zeros_like(q)
    for t, row in enumerate(q):
        seen = slice(0, first + t + 1)
        scores = np.einsum("nd,snd->ns", row, keys[seen]) / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[t] = np.einsum("ns,snd->nd", weights / weights.sum(axis=1, keepdims=True), values[seen])
    return out
