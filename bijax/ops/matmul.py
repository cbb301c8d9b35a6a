"""Matmul: the same bits for a row at any number of rows, and weight gradients that do not mind micro-batches."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bijax.ops._checks import describe, float_array, float_dtype, same_dtype
from bijax.ops._matmul_backends import Product
from bijax.ops._matmul_kernels import (
    matmul_kernel,
    stacked_matmul_kernel,
    stacked_weight_gradient_kernel,
    weight_gradient_kernel,
)
from bijax.ops._precision import precision_name
from bijax.ops._primitive import Arrays
from bijax.ops.sum_rows import sum_rows

_OP = "bijax.matmul"


def matmul(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies the rows of `x` by the weights `w`.

    Products are summed in float32, in an order that depends on K, the storage of `w` and the device's architecture
    alone, and the sum is rounded once. On a Hopper GPU every dtype runs on the tensor cores, in one launch for any
    number of leading dimensions; gradients of float32 weights run there as a portable program.

    Args:
        x: (..., K) float32, bfloat16 or float16. Any number of rows, 0 included; K may be 0.
        w: (K, N) of the same dtype, or (N, K) with `transpose_w`; or (B..., K, N) with leading dimensions equal to
            those of `x` (B..., M, K), for a batch of products.
        bias: (N,) of the same dtype, added in float32 before the result is rounded.
        transpose_w: Whether `w` is stored as (N, K).
        precision: As in `jax.lax.dot_general`. On a Hopper GPU float32 operands are multiplied in TF32 by default, with
            float32 accuracy at HIGHEST; elsewhere always in full float32. TF32 operands are cut to 10 bits of fraction
            where XLA rounds them: errors are 2.1 to 2.7 times XLA's, and a sum of products of one sign comes out 0.0007
            too small.
        preferred_element_type: Dtype of the result; that of `x` by default.

    Returns:
        (..., N).

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If ranks or the contracted lengths do not fit.

    Guarantee: row-invariant; the gradient of `x` too. The gradients of `w` and `bias` are split-invariant for cuts of
    the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`): that of `bias`, and that of `w` in a portable
    program or on the CPU, where the gradients of 128 rows each are added upwards; that of `w` everywhere, where
    `weight_gradient` continues the sum.

    Source: fixed-tile matmul without split-K, as the project's first and third seed documents describe it.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 300))
        >>> w = jax.random.normal(jax.random.key(1), (300, 64))
        >>> bool((matmul(x, w)[:1] == matmul(x[:1], w)).all())
        True
    """
    x, w = float_array(_OP, "x", x), float_array(_OP, "w", w)
    bias = None if bias is None else float_array(_OP, "bias", bias)
    same_dtype(_OP, x=x, w=w, bias=bias)
    dtype = x.dtype
    if preferred_element_type is not None:
        dtype = float_dtype(_OP, "preferred_element_type", preferred_element_type)
    product = Product(dtype.name, transpose_w, _precision(precision))
    _check_shapes(x, w, bias, transpose_w)
    stack = () if w.ndim == 2 else (math.prod(w.shape[:-2]),)
    rows = x.shape[-2:-1] if stack else (math.prod(x.shape[:-1]),)
    y = _matmul(x.reshape(*stack, *rows, x.shape[-1]), w.reshape(*stack, *w.shape[-2:]), bias, product)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def weight_gradient(x: Any, g: Any, *, transpose_w: bool = False, accumulate: Any = None) -> jax.Array:
    """Returns the gradient of the weights of `matmul(x, w)` for the cotangent `g`, in float32.

    The rows are summed in ascending order: in chunks of 128, or on a Hopper GPU, for two operands of bfloat16 or of
    float16, in one chain with 16 rows a step. With `accumulate` the sum of a previous call goes on, so that
    micro-batches cut at multiples of 128 rows give the bits of the whole batch.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        g: (..., N) of any of these dtypes, with as many rows as `x`.
        transpose_w: Whether the weights are stored as (N, K).
        accumulate: The result of a previous call, float32 of the result's shape, to be continued.

    Returns:
        (K, N) float32, or (N, K) with `transpose_w`.

    Raises:
        TypeError: If a dtype is unsupported or `accumulate` is not float32.
        ValueError: If the shapes do not fit.

    Guarantee: split-invariant, for cuts at multiples of 128 rows.

    Example:
        >>> x, g = jnp.ones((256, 3)), jnp.ones((256, 2))
        >>> whole = weight_gradient(x, g)
        >>> parts = weight_gradient(x[128:], g[128:], accumulate=weight_gradient(x[:128], g[:128]))
        >>> bool((whole == parts).all())
        True
    """
    op = "bijax.ops.weight_gradient"
    x, g = float_array(op, "x", x), float_array(op, "g", g)
    if x.shape[:-1] != g.shape[:-1] or x.ndim < 1:
        raise ValueError(f"{op}: x and g must have the same rows, got x {describe(x)} and g {describe(g)}.")
    x, g = (a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in (x, g))
    shape = (g.shape[1], x.shape[1]) if transpose_w else (x.shape[1], g.shape[1])
    if accumulate is not None:
        accumulate = float_array(op, "accumulate", accumulate)
        if accumulate.dtype != jnp.float32:
            raise TypeError(f"{op}: accumulate must be float32, got {describe(accumulate)}.")
        if accumulate.shape != shape:
            raise ValueError(
                f"{op}: accumulate must have the shape {shape} of the weights, got {describe(accumulate)}."
            )
    return _weight_gradient(x, g, accumulate, Product("float32", transpose_w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    """(M, K) x (K, N), or a stack of them, without checks."""
    kernel = matmul_kernel if w.ndim == 2 else stacked_matmul_kernel
    return kernel(x, w, *_given(bias), product=product)[0]


def _matmul_forward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    return _matmul(x, w, bias, product), (x, w, bias)


def _matmul_backward(
    product: Product, saved: tuple[jax.Array, jax.Array, jax.Array | None], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, w, bias = saved
    dx = _matmul(g, w, None, replace(product, transpose_w=not product.transpose_w, out_dtype=x.dtype.name))
    dw = _weight_gradient(x, g, None, replace(product, out_dtype=w.dtype.name))
    if bias is None:
        return dx, dw, None
    return dx, dw, sum_rows(g.reshape(-1, g.shape[-1])).astype(bias.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    """Continues the sum of outer products of the rows of x (M, K) and g (M, N), or of stacks, without checks."""
    kernel = weight_gradient_kernel if x.ndim == 2 else stacked_weight_gradient_kernel
    return kernel(x, g, *_given(total), product=product)[0]


def _weight_gradient_forward(
    x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, bool]]:
    return _weight_gradient(x, g, total, product), (x, g, total is not None)


def _weight_gradient_backward(
    product: Product, saved: tuple[jax.Array, jax.Array, bool], ct: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, g, continued = saved
    dx = _matmul(g, ct, None, replace(product, transpose_w=not product.transpose_w, out_dtype=x.dtype.name))
    dg = _matmul(x, ct, None, replace(product, out_dtype=g.dtype.name))
    return dx, dg, ct.astype(jnp.float32) if continued else None


_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)


def _given(array: jax.Array | None) -> Arrays:
    return () if array is None else (array,)


def _precision(precision: Any) -> str:
    try:
        return precision_name(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_OP}: precision must be one that jax.lax.dot takes, got {precision!r}.") from error


def _check_shapes(x: jax.Array, w: jax.Array, bias: jax.Array | None, transpose_w: bool) -> None:
    came = f"got x {describe(x)} and w {describe(w)} with transpose_w={transpose_w}"
    if x.ndim < 1 or w.ndim < 2:
        raise ValueError(f"{_OP}: x must have at least 1 and w at least 2 dimensions, {came}.")
    if w.ndim > 2 and x.shape[:-2] != w.shape[:-2]:
        raise ValueError(f"{_OP}: the leading dimensions of x and w must be equal when w has some, {came}.")
    k, n = (w.shape[-1], w.shape[-2]) if transpose_w else (w.shape[-2], w.shape[-1])
    if x.shape[-1] != k:
        raise ValueError(
            f"{_OP}: the last dimension of x must be the contracted dimension K={k} of w, {came};"
            f" pass transpose_w={not transpose_w} if w is stored the other way."
        )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{_OP}: bias must have the shape ({n},) of w's columns, got bias {describe(bias)}, {came}.")
