"""The norms of linear attention: gated RMSNorm of its outputs, length 1 for its queries and keys."""

from typing import Any

import jax

from bijax.core.checks import describe, float_array, row_vector
from bijax.core.derivative import custom_vjp
from bijax.dispatch.gated_norm import gated_rms_norm_kernel, times_silu
from bijax.dispatch.rows import as_rows
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
        >>> import jax.numpy as jnp
        >>> gated_rms_norm(jnp.array([3.0, 3.0]), jnp.array([0.0, 30.0]), eps=0.0).tolist()
        [0.0, 30.0]
    """
    op = "bijax.gated_rms_norm"
    x, gate = float_array(op, "x", x), float_array(op, "gate", gate)
    if gate.shape != x.shape:
        raise ValueError(f"{op}: gate must have the shape of x, got x {describe(x)} and gate {describe(gate)}.")
    weight, eps = row_vector(op, "weight", weight, x), check_eps(op, eps)
    if x.size == 0 or x.ndim < 1:
        return _apart(x, gate, weight, 0, eps)
    return _gated(x, gate.reshape(-1, gate.shape[-1]), weight, 0, eps)


def gated_heads(x: Any, gate: Any, weight: Any, *, eps: float) -> jax.Array:
    """Returns `gated_rms_norm` of heads whose gates are the last columns of rows.

    Args:
        x: (B, T, H, V), as for `gated_rms_norm`.
        gate: (B, T, H * V or more), in which the last H * V columns of a token are its gates.
        weight: (V,).
        eps: As for `gated_rms_norm`.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: As `gated_rms_norm`.
        ValueError: As `gated_rms_norm`.

    Guarantee: as `gated_rms_norm`.
    """
    op = "bijax.gated_rms_norm"
    x, gate = float_array(op, "x", x), float_array(op, "gate", gate)
    weight, eps = row_vector(op, "weight", weight, x), check_eps(op, eps)
    columns = x.shape[-1] * x.shape[-2]
    if gate.shape[:-1] != x.shape[:-2] or gate.shape[-1] < columns:
        raise ValueError(
            f"{op}: gate must have the rows of x and at least {columns} columns, got x {describe(x)} and gate"
            f" {describe(gate)}."
        )
    column = gate.shape[-1] - columns
    if x.size == 0:
        return _apart(x, gate, weight, column, eps)
    return _gated(x, gate.reshape(-1, gate.shape[-1]), weight, column, eps)


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
        >>> import jax.numpy as jnp
        >>> l2_norm(jnp.array([3.0, 0.0, 0.0, 4.0]), eps=0.0).round(6).tolist()
        [0.6000000238418579, 0.0, 0.0, 0.800000011920929]
    """
    op = "bijax.l2_norm"
    x, eps = float_array(op, "x", x), check_eps(op, eps)
    if x.ndim < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension, got {describe(x)}.")
    columns = max(x.shape[-1], 1)
    return rms_norm_times(x, columns**-0.5, eps=eps / columns)


@custom_vjp(nondiff_argnums=(3, 4))
def _gated(x: jax.Array, gate: jax.Array, weight: jax.Array | None, column: int, eps: float) -> jax.Array:
    """Returns the gated norm of x (..., C); its gates are the columns of gate (N, D) from `column` on."""
    rows, back = as_rows(x, (x.ndim - 1,))
    return back(gated_rms_norm_kernel({"x": rows, "gate": gate, "weight": weight}, column=column, eps=eps)[0])


def _apart(x: jax.Array, gate: jax.Array, weight: jax.Array | None, column: int, eps: float) -> jax.Array:
    """Does what `_gated` does by two operations that have gradients, with the same bits."""
    normal = wide_rms_norm("bijax.gated_rms_norm", x, weight, eps=eps)
    y: jax.Array = _times_silu(normal, gate[..., column:].reshape(x.shape))
    return y.astype(x.dtype)


def _forward(x: jax.Array, gate: jax.Array, weight: jax.Array | None, column: int, eps: float) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, gate, weight: _apart(x, gate, weight, column, eps), x, gate, weight)


def _backward(_: int, __: float, pull: Any, g: jax.Array) -> Any:
    return pull(g)


_gated.defvjp(_forward, _backward)

_times_silu: Any = elementwise(times_silu)
