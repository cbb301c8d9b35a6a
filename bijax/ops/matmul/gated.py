"""A pair of matmuls whose results are multiplied: the first half of a gated feed-forward layer."""

import math
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from bijax.core.checks import describe, flag, float_array, same_dtype
from bijax.core.explicit_axes import gathered_once
from bijax.dispatch.matmul import Product
from bijax.ops.matmul._arguments import check_activation, check_operands, precision_of, result_dtype
from bijax.ops.matmul._fused import Fusion, fused_matmul
from pallas_kernels.matmul.activations import Activation

_OP = "bijax.gated_matmul"


def gated_matmul(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    *,
    activation: Activation | None = "silu",
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate) * (x @ w_up), as in SwiGLU and GeGLU.

    Both products are computed as by `bijax.matmul` in float32; the result is rounded once.

    Args:
        x: (..., K) float32, bfloat16 or float16. Any number of rows, 0 included.
        w_gate: (K, N) of the same dtype, or (N, K) with `transpose_w`.
        w_up: The same.
        activation: "silu", "gelu" (its tanh approximation), "relu" or None, as for `bijax.matmul`.
        transpose_w: Whether the weights are stored as (N, K).
        precision: As for `bijax.matmul`.
        preferred_element_type: Dtype of the result; `x.dtype` by default.

    Returns:
        (..., N).

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If the shapes do not fit, or there is no such activation.

    Guarantee: row-invariant; the gradient of `x` too. The gradients of the weights are those of `bijax.matmul`. The
    backward pass computes both products again.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[1.0, 2.0]])
        >>> gated_matmul(x, jnp.ones((2, 1)), jnp.ones((2, 1)), activation="relu").tolist()
        [[9.0]]
    """
    x, w_gate, w_up = gathered_once(x, w_gate, w_up)
    x, w_gate, w_up = (float_array(_OP, n, a) for n, a in (("x", x), ("w_gate", w_gate), ("w_up", w_up)))
    same_dtype(_OP, x=x, w_gate=w_gate, w_up=w_up)
    dtype = result_dtype(_OP, x, preferred_element_type)
    precision = precision_of(_OP, precision)
    if w_gate.ndim != 2 or w_gate.shape != w_up.shape:
        raise ValueError(
            f"{_OP}: w_gate and w_up must be two matrices of one shape, got {describe(w_gate)} and {describe(w_up)};"
            " use jax.vmap for stacks."
        )
    transpose_w = flag(_OP, "transpose_w", transpose_w)
    check_operands(_OP, x, w_gate, None, transpose_w)
    check_activation(_OP, activation)
    fusion = Fusion(Product(dtype.name, transpose_w, precision), activation, (True, False, False))
    y = fused_matmul(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w_gate, w_up, None, None, fusion)
    return y.reshape(*x.shape[:-1], y.shape[-1])
