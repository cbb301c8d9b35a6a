"""The RMSNorm of some heads of packed queries, keys and values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array, integer
from bijax.core.derivative import custom_vjp
from bijax.ops.norm._arguments import check_eps, check_offset
from bijax.ops.norm.norms import Numbers, rms_norm_gradient_kernel, rms_norm_gradients, rms_norm_kernel
from bijax.ops.rows.sum_rows import sum_rows
from pallas_kernels.parts.xla.tiles import isolate

_OP = "bijax.head_rms_norm"


def head_rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    head_offset: int = 0,
    head_num: int | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> jax.Array:
    """Divides the heads [head_offset, head_offset + head_num) by their root mean square; the others stay as they are.

    Each head has the bits of `bijax.rms_norm` of that head alone. Where `x` is not used again, XLA writes the result
    in its place.

    Args:
        x: (..., H, D) float32, bfloat16 or float16, for example queries, keys and values packed along H.
        weight: (D,), shared by the heads, or (head_num, D), of any of these dtypes.
        head_offset: First head to normalise, in [0, H].
        head_num: How many heads to normalise; all from `head_offset` on by default.
        eps: Added to the mean square; at least 0.
        weight_offset: Added to the weight in float32, as in `bijax.rms_norm`.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If a dtype is unsupported, or `head_offset` or `head_num` is not an integer, or `eps` or
            `weight_offset` not a number that is known when the program is traced.
        ValueError: If the shapes do not fit, the heads do not exist, `eps` is negative or not finite, or
            `weight_offset` is not finite or comes without a weight.

    Guarantee: row-invariant (a row is one head of one token); the gradient of `x` too. The gradient of `weight` is
    split-invariant for cuts of the tokens at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Source: "head_rms_norm" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> qkv = jnp.array([[[3.0, 3.0], [4.0, -4.0], [5.0, 5.0]]])
        >>> head_rms_norm(qkv, jnp.array([[1.0, 2.0]]), head_offset=1, head_num=1, eps=0.0).tolist()
        [[[3.0, 3.0], [1.0, -2.0], [5.0, 5.0]]]
    """
    x = float_array(_OP, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{_OP}: x must have at least 2 dimensions (..., heads, columns), got {describe(x)}.")
    start = integer(_OP, "head_offset", head_offset)
    heads = x.shape[-2] - start if head_num is None else integer(_OP, "head_num", head_num)
    if start < 0 or heads < 0 or start + heads > x.shape[-2]:
        raise ValueError(
            f"{_OP}: the heads must lie in [0, {x.shape[-2]}), got head_offset={start} and head_num={heads} for x"
            f" {describe(x)}."
        )
    weight = _weight(weight, heads, x)
    numbers = Numbers(check_eps(_OP, eps), check_offset(_OP, weight, weight_offset))
    return _head_rms_norm(x, weight, start, heads, numbers)


def _weight(weight: Any, heads: int, x: jax.Array) -> jax.Array | None:
    if weight is None:
        return None
    array = float_array(_OP, "weight", weight)
    if array.shape not in (x.shape[-1:], (heads, x.shape[-1])):
        raise ValueError(
            f"{_OP}: weight must have the shape {x.shape[-1:]} of a head or {(heads, x.shape[-1])} of the heads to be"
            f" normalised, got weight {describe(array)} and x {describe(x)}."
        )
    return array


@custom_vjp(nondiff_argnums=(2, 3, 4))
def _head_rms_norm(x: jax.Array, weight: jax.Array | None, start: int, heads: int, numbers: Numbers) -> jax.Array:
    return _forward(x, weight, start, heads, numbers)[0]


def _forward(x: jax.Array, weight: jax.Array | None, start: int, heads: int, numbers: Numbers) -> tuple[jax.Array, Any]:
    chosen = lax.slice_in_dim(x, start, start + heads, axis=x.ndim - 2)
    rows = chosen.reshape(math.prod(chosen.shape[:-1]), x.shape[-1])
    if weight is None or weight.ndim == 1:
        y, factor = rms_norm_kernel({"x": rows, "weight": weight}, **numbers.of_forward)
    else:
        # Weights that differ by head are applied outside: a kernel's vector is shared by all of its rows. Rows in
        # float32 are returned unrounded, so the steps and their roundings are the same.
        y, factor = rms_norm_kernel({"x": rows.astype(jnp.float32)}, eps=numbers.eps)
        y = _times_weight(y, weight, numbers.offset).astype(x.dtype)
    y = lax.dynamic_update_slice_in_dim(x, y.reshape(chosen.shape), start, axis=x.ndim - 2)
    return y, (rows, factor, weight)


def _backward(start: int, heads: int, numbers: Numbers, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    rows, factor, weight = saved
    chosen = lax.slice_in_dim(g, start, start + heads, axis=g.ndim - 2)
    g_rows = chosen.reshape(rows.shape)
    if weight is None or weight.ndim == 1:
        arrays = {"h": rows, "factor": factor, "g": g_rows, "weight": weight}
        dh, dw = rms_norm_gradients(arrays, numbers)
    else:
        wide, g_wide = rows.astype(jnp.float32), g_rows.astype(jnp.float32)
        arrays = {"h": wide, "factor": factor, "g": _times_weight(g_wide, weight, numbers.offset)}
        (dh,) = rms_norm_gradient_kernel(arrays)
        (part,) = isolate(g_wide * isolate(wide * factor)[0])
        tokens = rows.shape[0] // max(heads, 1)
        dw = sum_rows(part.reshape(tokens, weight.size)).reshape(weight.shape).astype(weight.dtype)
    dh = dh.reshape(chosen.shape).astype(g.dtype)
    return lax.dynamic_update_slice_in_dim(g, dh, start, axis=g.ndim - 2), dw


_head_rms_norm.defvjp(_forward, _backward)


def _times_weight(rows: jax.Array, weight: jax.Array, offset: float) -> jax.Array:
    """Multiplies (M * heads, D) float32 rows by a weight (heads, D) plus an offset, cycling through the heads."""
    heads, columns = weight.shape
    if offset:
        # After a barrier, or a product that made the weight would be contracted with this sum.
        weight = isolate(weight)[0].astype(jnp.float32) + jnp.float32(offset)
    by_head = rows.reshape(rows.shape[0] // max(heads, 1), heads, columns)
    return isolate((by_head * weight.astype(jnp.float32)).reshape(rows.shape))[0]
