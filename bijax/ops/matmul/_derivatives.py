"""Matmul and the gradient of its weights as functions that JAX differentiates any number of times, without checks."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.matmul import (
    Product,
    matmul_kernel,
    stacked_matmul_kernel,
    stacked_weight_gradient_kernel,
    weight_gradient_kernel,
)
from bijax.ops.rows.sum_rows import sum_rows


@custom_vjp(nondiff_argnums=(3,))
def differentiable_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    """(M, K) x (K, N), or a stack of them, without checks."""
    kernel = matmul_kernel if w.ndim == 2 else stacked_matmul_kernel
    return kernel(x, w, *_given(bias), product=product)[0]


def _matmul_forward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    return differentiable_matmul(x, w, bias, product), (x, w, bias)


def matmul_gradients(
    product: Product, saved: tuple[jax.Array, jax.Array, jax.Array | None], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the gradients of x, w and bias for the cotangent `g`, without K splits."""
    x, w, bias = saved
    product = replace(product, splits=1)
    dx = differentiable_matmul(
        g, w, None, replace(product, transpose_w=not product.transpose_w, out_dtype=x.dtype.name)
    )
    dw = differentiable_weight_gradient(x, g, None, replace(product, out_dtype=w.dtype.name))
    if bias is None:
        return dx, dw, None
    return dx, dw, sum_rows(g.reshape(math.prod(g.shape[:-1]), g.shape[-1])).astype(bias.dtype)


differentiable_matmul.defvjp(_matmul_forward, matmul_gradients)


@custom_vjp(nondiff_argnums=(3,))
def differentiable_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    """Continues the sum of outer products of the rows of x (M, K) and g (M, N), or of stacks, without checks."""
    kernel = weight_gradient_kernel if x.ndim == 2 else stacked_weight_gradient_kernel
    return kernel(x, g, *_given(total), product=product)[0]


def _weight_gradient_forward(
    x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, bool]]:
    return differentiable_weight_gradient(x, g, total, product), (x, g, total is not None)


def _weight_gradient_backward(
    product: Product, saved: tuple[jax.Array, jax.Array, bool], ct: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, g, continued = saved
    dx = differentiable_matmul(
        g, ct, None, replace(product, transpose_w=not product.transpose_w, out_dtype=x.dtype.name)
    )
    dg = differentiable_matmul(x, ct, None, replace(product, out_dtype=g.dtype.name))
    return dx, dg, ct.astype(jnp.float32) if continued else None


differentiable_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)


def _given(array: jax.Array | None) -> Arrays:
    return () if array is None else (array,)
