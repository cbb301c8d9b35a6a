"""The operations that a layer is built on: those of bijax."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import bijax
from bijax.ops.matmul.joined import joined_matmul, known_matmul
from bijax.ops.norm.norms import add_rms_norm

from ..routing import Routing
from .attention import AttentionOps
from .experts import experts, quantized_experts, route
from .linear_attention import LinearAttentionOps


@dataclass(frozen=True)
class Ops(AttentionOps, LinearAttentionOps):
    """The operations whose bits may depend on the batch; everything else in a layer is exact.

    The layers of this package call nothing else for their arithmetic, except for single additions, which are exactly
    rounded however they are compiled. `INVARIANT` is an object of this class; `PLAIN` one of a subclass that replaces
    every operation by stock JAX. Others replace some of them, in a frozen dataclass: objects must compare equal to
    their copies.

    Guarantee: row-invariant: the bits of a row do not depend on the batch, the padding and the cut of the work.

    Example:
        >>> x, w = jax.random.normal(jax.random.key(0), (8, 300)), jnp.ones((300, 4))
        >>> bool((INVARIANT.matmul(x, w)[:1] == INVARIANT.matmul(x[:1], w)).all())
        True
    """

    def matmul(
        self,
        x: jax.Array,
        w: jax.Array,
        *,
        bias: jax.Array | None = None,
        transpose_w: bool = False,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Multiplies the rows of x (..., K) by w (K, N), or (N, K) with `transpose_w`."""
        return bijax.matmul(
            x,
            w,
            bias=bias,
            transpose_w=transpose_w,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    def joined_matmul(self, x: jax.Array, w: jax.Array, other: jax.Array) -> jax.Array:
        """Multiplies x (M, K) by w (K, N) and, in the same pass, by other (K, N'); the result is float32.

        The columns of both products are followed by zeros up to any number. Gradients are those of `known_matmul`.
        """
        return joined_matmul(x, w, other)

    def known_matmul(self, x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        """Returns y (..., N or more) float32, whose first N columns are x (..., K) by w (K, N), with its gradients."""
        return known_matmul(x, w, y)

    def head_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies each head of x (B, T, N, K) by its own matrix of w (N, K, M)."""
        batch, length, heads, width = x.shape
        stacked = jnp.moveaxis(x, 2, 0).reshape(heads, batch * length, width)
        y = bijax.matmul(stacked, w).reshape(heads, batch, length, w.shape[2])
        return jnp.moveaxis(y, 0, 2)

    def quantized_matmul(
        self,
        x: jax.Array,
        weight: jax.Array,
        weight_scale: jax.Array,
        *,
        smooth_scale: jax.Array | None = None,
        bias: jax.Array | None = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Quantises the rows of x (..., K) * smooth_scale (K,) to int8 and multiplies by weight (K, N), int8."""
        rows, scale = bijax.scale_dynamic_quant(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), smooth_scale)
        dtype = x.dtype if preferred_element_type is None else preferred_element_type
        y = bijax.quant_matmul(rows, weight, scale, weight_scale, bias=bias, preferred_element_type=dtype)
        return y.reshape(*x.shape[:-1], weight.shape[1])

    def group_matmul(self, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Multiplies rows x (M, K), sorted by group, by the weights w (G, K, N) of groups of these sizes.

        Rows after the last group's are undefined.
        """
        return bijax.group_matmul(x, w, group_sizes)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the rows (..., D) of table (V, D) by tokens (...), integers; nan for tokens outside the table."""
        return bijax.embed(table, tokens)

    def rms_norm(self, x: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0) -> jax.Array:
        """Divides each row of x (..., C) by its root mean square, times weight (C,) + weight_offset."""
        return bijax.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)

    def add_rms_norm(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Returns x + residual, which is rounded to the dtype of x first, and its `rms_norm`."""
        return add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)

    def scale(self, x: jax.Array, factor: float) -> jax.Array:
        """Returns x times a factor that is rounded to the dtype of x."""
        return _scale(x, jnp.asarray(factor, x.dtype))

    def log_softmax(self, x: jax.Array) -> jax.Array:
        """Returns the log-probabilities of each row of x (..., C)."""
        return bijax.log_softmax(x)

    def soft_cap(self, x: jax.Array, cap: float) -> jax.Array:
        """Returns cap * tanh(x / cap), element by element."""
        return _soft_cap(x, jnp.asarray(cap, x.dtype))

    def swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns silu(gate) * up, element by element."""
        return _swiglu(gate, up)

    def geglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns gelu(gate) * up, element by element, with gelu approximated by tanh."""
        return _geglu(gate, up)

    def route(self, logits: jax.Array, bias: jax.Array | None, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Selects experts (T, topk) by the router's products (T, E), float32; returns their weights (T, topk) too.

        The products may have more columns, which are left out.
        """
        return route(logits, bias, routing)

    def experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Adds the results of each token's experts, times their weights.

        With tokens x (T, C), experts and weights (T, topk), and for each expert e the kernels gate_up[e] (C, 2 * I)
        and down[e] (I, C), around silu(gate) * up.
        """
        return experts(x, selected, weights, gate_up, down)

    def quantized_experts(
        self,
        x: jax.Array,
        selected: jax.Array,
        weights: jax.Array,
        gate_up: tuple[jax.Array, jax.Array],
        down: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """The same with kernels of int8 and the scales (E, N) of their columns; rows are quantised as they come."""
        return quantized_experts(x, selected, weights, gate_up, down)


@bijax.elementwise
def _scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor


@bijax.elementwise
def _soft_cap(x: jax.Array, cap: jax.Array) -> jax.Array:
    return jnp.tanh(x / cap) * cap


@bijax.elementwise
def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    wide = gate.astype(jnp.float32)
    return (jax.nn.gelu(wide, approximate=True) * up.astype(jnp.float32)).astype(gate.dtype)


@bijax.elementwise
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    wide = gate.astype(jnp.float32)
    return (jax.nn.silu(wide) * up.astype(jnp.float32)).astype(gate.dtype)


INVARIANT = Ops()
"""The operations of bijax."""
