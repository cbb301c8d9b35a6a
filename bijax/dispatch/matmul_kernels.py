"""The kernels of matmul as primitives: products, stacks of products, and the gradients of weights.

Every one takes one parameter, `product: Product`. Contracts are chosen by the platform's backend.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.matmul import PLATFORMS, Product

Parameters = dict[str, Any]


def _fold_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Rows of a mapped x are more rows; mapped weights are a stack of products."""
    if any(d is not None for d in axes[2:]):
        return _add_mapped_bias(matmul_kernel, size, arrays, axes, parameters)
    bias = arrays[2:]
    if axes[1] is None:
        (rows,) = fold_rows(size, arrays[:1], axes[:1])
        return unfold_rows(size, matmul_kernel(rows, arrays[1], *bias, **parameters))
    return stacked_matmul_kernel(*_in_front(arrays[:2], axes[:2]), *bias, **parameters)


def _fold_stacked_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Stacks of a mapped axis are one stack."""
    if any(d is not None for d in axes[2:]):
        return _add_mapped_bias(stacked_matmul_kernel, size, arrays, axes, parameters)
    operands = _fold_stacks(size, arrays[:2], axes[:2])
    return unfold_rows(size, stacked_matmul_kernel(*operands, *arrays[2:], **parameters))


def _add_mapped_bias(
    kernel: Kernel, size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters
) -> Arrays:
    """Adds a bias for each entry of the axis to the float32 sums, and rounds after that, as a kernel does."""
    product: Product = parameters["product"]
    wide = dataclasses.replace(product, out_dtype="float32")
    if axes[0] is None and axes[1] is None:
        (y,) = kernel(*arrays[:2], product=wide)
        y = y[None]
    else:
        (y,) = jax.vmap(lambda x, w: kernel(x, w, product=wide), axes[:2])(*arrays[:2])
    (bias,) = _in_front(arrays[2:], axes[2:])
    bias = bias.astype(jnp.float32).reshape(size, *(1,) * (y.ndim - 2), bias.shape[1])
    return ((y + bias).astype(product.out_dtype),)


def _fold_gradient(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Gradients of a mapped axis are a stack."""
    x, g, *total = _in_front(arrays, axes)
    total = [jnp.broadcast_to(t, (size, *t.shape[-2:])) for t in total]
    if x.ndim == g.ndim == 2:  # only the sum to continue is mapped
        x = jnp.broadcast_to(x, (size, *x.shape))
    return stacked_weight_gradient_kernel(x, g, *total, **parameters)


def _fold_stacked_gradient(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    return unfold_rows(size, stacked_weight_gradient_kernel(*_fold_stacks(size, arrays, axes), **parameters))


def _in_front(arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Returns the arrays with a mapped axis in front; those that do not carry it are as they were."""
    return tuple(a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, axes, strict=True))


def _fold_stacks(size: int, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Returns stacks with the mapped axis merged into theirs; a matrix that every entry shares is repeated."""
    arrays = _in_front(arrays, axes)
    matrices = [a.ndim - (d is not None) == 2 for a, d in zip(arrays, axes, strict=True)]
    entries = next(a.shape[-3] for a, matrix in zip(arrays, matrices, strict=True) if not matrix)
    whole = (
        jnp.broadcast_to(a[..., None, :, :], (*a.shape[:-2], entries, *a.shape[-2:])) if matrix else a
        for a, matrix in zip(arrays, matrices, strict=True)
    )
    return fold_rows(size, tuple(whole), [None if d is None else 0 for d in axes])


def _kernels(name: str) -> dict[str, Kernel]:
    """Returns a function of every platform's backend, whose third operand may be left out, as a kernel."""

    def kernel(function: Callable[..., jax.Array]) -> Kernel:
        def call(a: jax.Array, b: jax.Array, c: jax.Array | None = None, *, product: Product) -> Arrays:
            return (function(a, b, c, product),)

        return call

    return {platform: kernel(getattr(backend, name)) for platform, backend in PLATFORMS.items()}


def _product_shape(x: jax.Array, w: jax.Array, *_: jax.Array, product: Product) -> Arrays:
    n = w.shape[-2 if product.transpose_w else -1]
    return (jnp.zeros((*w.shape[:-2], x.shape[-2], n), product.out_dtype),)


def _gradient_shape(x: jax.Array, g: jax.Array, *_: jax.Array, product: Product) -> Arrays:
    k, n, lead = x.shape[-1], g.shape[-1], x.shape[:-2] or g.shape[:-2]
    return (jnp.zeros((*lead, *((n, k) if product.transpose_w else (k, n))), product.out_dtype),)


matmul_kernel = define_kernel("matmul", _kernels("matmul"), _fold_matmul, _product_shape)
"""(M, K) x (K, N), or (N, K) with `transpose_w`; a third operand (N,) is a bias."""

stacked_matmul_kernel = define_kernel("stacked_matmul", _kernels("matmul"), _fold_stacked_matmul, _product_shape)
"""(G, M, K) or (M, K) x (G, K, N), or (G, N, K) with `transpose_w`; a third operand (N,) is a bias."""

weight_gradient_kernel = define_kernel("weight_gradient", _kernels("weight_gradient"), _fold_gradient, _gradient_shape)
"""(M, K), (M, N); a third operand is a float32 sum to continue."""

stacked_weight_gradient_kernel = define_kernel(
    "stacked_weight_gradient", _kernels("weight_gradient"), _fold_stacked_gradient, _gradient_shape
)
"""(G, M, K), (G, M, N), of which one may be a matrix; a third operand is a stack of float32 sums to continue."""
