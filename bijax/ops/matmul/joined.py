"""Products of the same rows by two matrices, computed together and differentiated apart."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.derivative import custom_vjp
from bijax.core.explicit_axes import gathered_once
from bijax.dispatch.joined_matmul import joined_matmul_kernel
from bijax.dispatch.matmul import Product
from bijax.ops.matmul._arguments import precision_of
from bijax.ops.matmul._derivatives import matmul_gradients

_OP = "bijax.matmul"


def joined_matmul(x: jax.Array, w: jax.Array, other: jax.Array) -> jax.Array:
    """Multiplies rows by two matrices, with the bits of `bijax.matmul` and a float32 result. No checks.

    The result has no gradient: `known_matmul` gives each product its own, where it is used.

    Args:
        x: (M, K).
        w: (K, N) of the same dtype.
        other: (K, N') of the same dtype.

    Returns:
        (M, N + N' or more) float32: the columns of both products, then zeros.

    Guarantee: row-invariant.

    Example:
        >>> y = joined_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.full((3, 1), 2.0))
        >>> y[0, :5].tolist(), float(y[:, 5:].sum())
        ([3.0, 3.0, 3.0, 3.0, 6.0], 0.0)
    """
    x, w, other = (lax.stop_gradient(a) for a in gathered_once(x, w, other))
    return joined_matmul_kernel(x, w, other, product=_product())[0]


def known_matmul(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a product of `bijax.matmul` that was computed before, with the gradients of that operation. No checks.

    Args:
        x: (..., K).
        w: (K, N) of the same dtype.
        y: (..., N or more) float32, whose first N columns are the product.

    Returns:
        `y`.
    """
    x, w, y = gathered_once(x, w, y)
    count = math.prod(x.shape[:-1])
    return _known(x.reshape(count, x.shape[-1]), w, y.reshape(count, y.shape[-1])).reshape(y.shape)


@custom_vjp()
def _known(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    del x, w
    return y


def _forward(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return y, (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[Any, ...]:
    x, w = saved
    dx, dw, _ = matmul_gradients(_product(), (x, w, None), g[:, : w.shape[1]])
    return dx, dw, jnp.zeros_like(g)


_known.defvjp(_forward, _backward)


def _product() -> Product:
    return Product("float32", False, precision_of(_OP, None))
