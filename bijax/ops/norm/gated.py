"""The norms of linear attention: gated RMSNorm of its outputs, length 1 for its queries and keys."""

from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, float_array
from bijax.ops.elementwise.call import elementwise
from bijax.ops.norm._arguments import check_eps
from bijax.ops.norm.norms import rms_norm_times, wide_rms_norm


def gated_rms_norm(x: Any, gate: Any, weight: Any = None, *, eps: float = 1e-6) -> jax.Array:
    """Divides rows by their root mean square and multiplies by a weight and by silu of a gate.

    y = x / sqrt(mean(x * x) + eps) * weight * silu(gate), computed in float32 and rounded once.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        gate: Of the shape of `x`, of any of these dtypes.
        weight: (C,) of any of these dtypes.
        eps: Added to the mean square; at least 0.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If a dtype is unsupported, or `eps` is not a number that is known when the program is traced.
        ValueError: If the shapes do not fit, or `eps` is negative or not finite.

    Guarantee: row-invariant; the gradients of `x` and `gate` too. The gradient of `weight` is split-invariant for cuts
    of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Source: Yang et al., "Gated Delta Networks", https://arxiv.org/abs/2412.06464.

    Example:
        >>> gated_rms_norm(jnp.array([3.0, 3.0]), jnp.array([0.0, 30.0]), eps=0.0).tolist()
        [0.0, 30.0]
    """
    op = "bijax.gated_rms_norm"
    x, gate = float_array(op, "x", x), float_array(op, "gate", gate)
    if gate.shape != x.shape:
        raise ValueError(f"{op}: gate must have the shape of x, got x {describe(x)} and gate {describe(gate)}.")
    normal = wide_rms_norm(op, x, weight, eps=eps)
    y: jax.Array = _times_silu(normal, gate)
    return y.astype(x.dtype)


def l2_norm(x: Any, *, eps: float = 1e-6) -> jax.Array:
    """Divides rows by their length: x / sqrt(sum(x * x) + eps), computed in float32 and rounded once.

    Args:
        x: (..., C) float32, bfloat16 or float16, for example the heads of queries and keys.
        eps: Added to the sum of squares; at least 0.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If the dtype is unsupported, or `eps` is not a number that is known when the program is traced.
        ValueError: If `x` has no dimensions, or `eps` is negative or not finite.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> l2_norm(jnp.array([3.0, 0.0, 0.0, 4.0]), eps=0.0).round(6).tolist()
        [0.6000000238418579, 0.0, 0.0, 0.800000011920929]
    """
    op = "bijax.l2_norm"
    x, eps = float_array(op, "x", x), check_eps(op, eps)
    if x.ndim < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension, got {describe(x)}.")
    columns = max(x.shape[-1], 1)
    return rms_norm_times(x, columns**-0.5, eps=eps / columns)


def _silu_product(x: jax.Array, gate: jax.Array) -> jax.Array:
    return x * jax.nn.silu(gate.astype(jnp.float32))


_times_silu: Any = elementwise(_silu_product)
