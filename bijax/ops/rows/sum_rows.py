"""Sums over the rows of a batch, for the gradients of weights that every row shares."""

import jax
import jax.numpy as jnp

from bijax.core.derivative import custom_vjp
from bijax.core.primitive import define_kernel
from bijax.dispatch.rows import row_backend


@custom_vjp()
def sum_rows(x: jax.Array) -> jax.Array:
    """Adds the rows of x (M, C) in chunks of 128; returns (C,) float32. No checks.

    Guarantee: split-invariant, for cuts at multiples of 128 rows.
    """
    return _kernel(x, jnp.zeros(x.shape[1:], jnp.float32), names=("x", "accumulate"))[0]


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sum_rows(x), x


def _backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(g, x.shape).astype(x.dtype),)


sum_rows.defvjp(_forward, _backward)


_kernel = define_kernel("sum_rows", row_backend("sum_rows"))
