"""Matmul: the same bits for a row at any number of rows, and weight gradients that do not depend on micro-batches."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, flag, float_array, same_dtype
from bijax.core.explicit_axes import gathered_once
from bijax.dispatch.matmul import Product
from bijax.ops.matmul._arguments import check_activation, check_operands, precision_of, result_dtype, splits_of
from bijax.ops.matmul._derivatives import differentiable_matmul, differentiable_weight_gradient
from bijax.ops.matmul._fused import Fusion, fused_matmul
from pallas_kernels.matmul.activations import Activation

_OP = "bijax.matmul"


def matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    split_k: int | Literal["auto"] | None = None,
) -> jax.Array:
    """Multiplies the rows of `x` by the weights `w`: activation(x @ w + bias) + residual.

    Products are summed in float32, in an order that depends on K, the storage of `w` and the device's architecture
    alone. The epilogue is computed in float32 too, with one rounding at the end. On a Hopper GPU every dtype runs on
    the tensor cores, in one launch for any number of leading dimensions (with an activation, a residual or split K, one
    per entry); gradients of float32 weights, or of weights with a float32 result, run there as a portable program, and
    the gradient of `x` with a float32 result is a float32 product.

    Args:
        x: (..., K) float32, bfloat16 or float16. Any number of rows, 0 included; K may be 0.
        w: (K, N) of the same dtype, or (N, K) with `transpose_w`; or (B..., K, N) with the leading dimensions of `x`
            (B..., M, K), for a batch of products.
        bias: (N,) of the same dtype, added in float32 before the result is rounded.
        activation: "gelu" (its tanh approximation), "silu", "relu" or None.
        residual: (..., N) of the result's dtype, added after the activation.
        transpose_w: Whether `w` is stored as (N, K).
        precision: As in `jax.lax.dot_general`. On a Hopper GPU float32 operands are multiplied in TF32 by default, with
            float32 accuracy at HIGHEST; elsewhere always in full float32. TF32 operands are truncated to 10 fraction
            bits where XLA rounds them: errors are 2.1 to 2.7 times XLA's, and a sum of products of one sign is 0.0007
            too small.
        preferred_element_type: Dtype of the result; `x.dtype` by default.
        split_k: Another contract, for long K and few columns, where one chain over K leaves most of a GPU idle: K is
            split into this many ranges (a power of two), each summed separately, and the sums are added as a fixed
            binary tree. "auto" derives the number from K and N (`pallas_kernels.contract.split_count`). The bits
            differ from the default's, so a layer must use the same setting at every batch size. The sums of the
            gradients are not split.

    Returns:
        (..., N).

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If ranks or the contracted lengths do not fit, or the activation or split is invalid.

    With an activation the backward pass recomputes the product instead of saving it in float32, and the gradient of the
    product is rounded to the dtype of the result, as it is without one. On a GPU the kernel has its own implementation
    of activations: `matmul(x, w, activation="silu")` need not have the bits of
    `bijax.elementwise(jax.nn.silu)` after a float32 product.

    Guarantee: row-invariant, with every option; the gradient of `x` too. The gradients of `w` and `bias` are
    split-invariant for cuts of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`): that of `bias`, and
    that of `w` in a portable program or on the CPU, where the gradients of 128 rows each are added in order; that of
    `w` everywhere, where `weight_gradient` continues the sum.

    Source: fixed tiles without split-K, as in "Defeating Nondeterminism in LLM Inference"
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 300))
        >>> w = jax.random.normal(jax.random.key(1), (300, 64))
        >>> bool((matmul(x, w)[:1] == matmul(x[:1], w)).all())
        True
    """
    x, w, residual = gathered_once(x, w, residual)
    x, w = float_array(_OP, "x", x), float_array(_OP, "w", w)
    bias = None if bias is None else float_array(_OP, "bias", bias)
    same_dtype(_OP, x=x, w=w, bias=bias)
    dtype = result_dtype(_OP, x, preferred_element_type)
    precision = precision_of(_OP, precision)
    transpose_w = flag(_OP, "transpose_w", transpose_w)
    check_operands(_OP, x, w, bias, transpose_w)
    n = w.shape[-2 if transpose_w else -1]
    product = Product(dtype.name, transpose_w, precision, splits=splits_of(_OP, split_k, x.shape[-1], n))
    stack = () if w.ndim == 2 else (math.prod(w.shape[:-2]),)
    rows = x.shape[-2:-1] if stack else (math.prod(x.shape[:-1]),)
    operands = x.reshape(*stack, *rows, x.shape[-1]), w.reshape(*stack, *w.shape[-2:])
    if activation is None and residual is None:
        return differentiable_matmul(*operands, bias, product).reshape(*x.shape[:-1], n)
    check_activation(_OP, activation)
    if residual is not None:
        residual = float_array(_OP, "residual", residual)
        if residual.dtype != dtype:
            raise TypeError(
                f"{_OP}: residual must have the dtype {dtype} of the result, got {describe(residual)}; convert it, or"
                " ask for its dtype with preferred_element_type."
            )
        if residual.shape != (*x.shape[:-1], n):
            raise ValueError(
                f"{_OP}: residual must have the shape of the result, {(*x.shape[:-1], n)}, got {describe(residual)}."
            )
        residual = residual.reshape(*stack, *rows, n)
    fusion = Fusion(product, activation, (False, bias is not None, residual is not None))

    def fused(x: jax.Array, w: jax.Array, residual: jax.Array | None) -> jax.Array:
        return fused_matmul(x, w, None, bias, residual, fusion)

    y = jax.vmap(fused)(*operands, residual) if stack else fused(*operands, residual)
    return y.reshape(*x.shape[:-1], n)


def weight_gradient(
    x: ArrayLike, g: ArrayLike, *, transpose_w: bool = False, accumulate: ArrayLike | None = None
) -> jax.Array:
    """Returns the gradient of the weights of `matmul(x, w)` for the cotangent `g`, in float32.

    The rows are summed in ascending order: in chunks of 128, or on a Hopper GPU, for two bfloat16 or float16 operands
    or one bfloat16 and one float32 operand, in one chain with 16 rows per step. `accumulate` continues the sum of a
    previous call, so that micro-batches cut at multiples of 128 rows give the bits of the whole batch.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        g: (..., N) of any of these dtypes, with the same rows as `x`.
        transpose_w: Whether the weights are stored as (N, K).
        accumulate: The result of a previous call, float32 of the result's shape, to continue.

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
    return differentiable_weight_gradient(x, g, accumulate, Product("float32", transpose_w, precision_of(op, None)))
