"""Products and gradients of (stacked) matrices, by kernels that return plain float32 sums."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Kernel = Callable[..., jax.Array]


def multiply(
    kernels: tuple[Kernel, Kernel],
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None,
    out_dtype: Any,
    **options: Any,
) -> jax.Array:
    """Multiplies by a kernel for matrices or by one for stacks, adds a bias to the sums, and rounds.

    Args:
        kernels: The kernels for matrices and for stacks; they return the sums.
        x: (M, K), or (..., M, K) for a stack; a stack of weights may have one `x`.
        w: Weights as the kernels take them, with or without leading dimensions.
        bias: (N,) or None.
        out_dtype: Dtype of the result.
        **options: Optional arguments of the kernels.
    """
    single, stack = kernels
    if w.ndim == 2:
        y = single(x, w, **options)
    else:
        y = stack(jnp.broadcast_to(x, (*w.shape[:-2], *x.shape[-2:])), w, **options)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(out_dtype)


def weight_gradient(
    kernels: tuple[Kernel, Kernel], x: jax.Array, g: jax.Array, *, accumulate: jax.Array | None, out_dtype: Any
) -> jax.Array:
    """Sums the outer products of the rows of `x` and `g`, matrices or stacks, and rounds.

    Args:
        kernels: The kernel for matrices, which takes a sum to continue as `accumulate`, and the kernel for stacks.
        x: (M, K) or (..., M, K).
        g: (M, N) or (..., M, N). One of the two may have no leading dimensions and is then shared by every entry.
        accumulate: A previous sum of the result's shape, float32; or None.
        out_dtype: Dtype of the result.
    """
    single, stack = kernels
    lead = x.shape[:-2] or g.shape[:-2]
    x, g = (jnp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (x, g))
    if not lead:
        y = single(x, g, accumulate=accumulate)
    elif accumulate is None:
        y = stack(x, g)
    else:
        y = lax.map(lambda entry: single(*entry[:2], accumulate=entry[2]), (x, g, accumulate))
    return y.astype(out_dtype)
