"""Matmul: the same bits for a row at any number of rows, and weight gradients that do not mind micro-batches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.ops._checks import describe, float_array, float_dtype, same_dtype
from bijax.ops._matmul_kernels import matmul_kernel, weight_gradient_kernel
from bijax.ops._primitive import Arrays
from bijax.ops.sum_rows import sum_rows
from pallas_kernels.contract import chunk_contract, matmul_contract

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

    Products are summed in float32 in an order that depends on K and on the storage of `w` alone.

    Args:
        x: (..., K) float32, bfloat16 or float16. Any number of rows, 0 included; K may be 0.
        w: (K, N) of the same dtype, or (N, K) with `transpose_w`; or (B..., K, N) with leading dimensions equal to
            those of `x` (B..., M, K), for a batch of products.
        bias: (N,) of the same dtype, added in float32 before the result is rounded.
        transpose_w: Whether `w` is stored as (N, K).
        precision: As in `jax.lax.dot_general`. On the CPU every precision is full float32.
        preferred_element_type: Dtype of the result; that of `x` by default.

    Returns:
        (..., N).

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If ranks or the contracted lengths do not fit.

    Guarantee: row-invariant; the gradient of `x` too. The gradients of `w` and `bias` are split-invariant for cuts of
    the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`), see `weight_gradient`.

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
    _check_precision(precision)
    _check_shapes(x, w, bias, transpose_w)
    lead = x.shape[:-1] if w.ndim == 2 else w.shape[:-2]
    if w.ndim == 2:
        y = _matmul(x.reshape(math.prod(lead), x.shape[-1]), w, transpose_w)
    else:
        stack = math.prod(lead)
        y = jax.vmap(lambda x, w: _matmul(x, w, transpose_w))(
            x.reshape(stack, *x.shape[-2:]), w.reshape(stack, *w.shape[-2:])
        )
    if bias is not None:
        y = _add_bias(y.reshape(-1, y.shape[-1]), bias)
    return y.reshape(*x.shape[:-1], y.shape[-1]).astype(dtype)


def weight_gradient(x: Any, g: Any, *, transpose_w: bool = False, accumulate: Any = None) -> jax.Array:
    """Returns the gradient of the weights of `matmul(x, w)` for the cotangent `g`, in float32.

    The rows are summed in chunks of 128 in ascending order. With `accumulate` the chain of a previous call goes on,
    so that micro-batches cut at multiples of 128 rows give the bits of the whole batch:

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
    if accumulate is None:
        accumulate = jnp.zeros(shape, jnp.float32)
    accumulate = float_array(op, "accumulate", accumulate)
    if accumulate.dtype != jnp.float32:
        raise TypeError(f"{op}: accumulate must be float32, got {describe(accumulate)}.")
    if accumulate.shape != shape:
        raise ValueError(f"{op}: accumulate must have the shape {shape} of the weights, got {describe(accumulate)}.")
    return accumulate_weight_gradient(x, g, accumulate, transpose_w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
    """(M, K) x (K, N) in float32, without checks."""
    contract = matmul_contract(x.shape[1], transpose_w=transpose_w)
    return matmul_kernel(x, w, contract=contract, transpose_w=transpose_w)[0]


def _matmul_forward(x: jax.Array, w: jax.Array, transpose_w: bool) -> tuple[jax.Array, Arrays]:
    return _matmul(x, w, transpose_w), (x, w)


def _matmul_backward(transpose_w: bool, saved: Arrays, g: jax.Array) -> Arrays:
    x, w = saved
    dw = accumulate_weight_gradient(x, g, jnp.zeros(w.shape, jnp.float32), transpose_w)
    return _matmul(g, w, not transpose_w).astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def accumulate_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array, transpose_w: bool) -> jax.Array:
    """Continues the sum of outer products of the rows of x (M, K) and g (M, N), without checks."""
    return weight_gradient_kernel(x, g, total, contract=chunk_contract(), transpose_w=transpose_w)[0]


def _weight_gradient_forward(
    x: jax.Array, g: jax.Array, total: jax.Array, transpose_w: bool
) -> tuple[jax.Array, Arrays]:
    return accumulate_weight_gradient(x, g, total, transpose_w), (x, g)


def _weight_gradient_backward(transpose_w: bool, saved: Arrays, ct: jax.Array) -> Arrays:
    x, g = saved
    return _matmul(g, ct, not transpose_w).astype(x.dtype), _matmul(x, ct, transpose_w).astype(g.dtype), ct


accumulate_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)


@jax.custom_vjp
def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.astype(jnp.float32)


def _add_bias_forward(y: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(y, bias), bias


def _add_bias_backward(bias: jax.Array, g: jax.Array) -> Arrays:
    return g, sum_rows(g).astype(bias.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _check_precision(precision: Any) -> None:
    try:
        jax.eval_shape(lambda a: lax.dot(a, a, precision=precision), jax.ShapeDtypeStruct((1, 1), jnp.float32))
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
