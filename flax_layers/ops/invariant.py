"""The operations of bijax."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import bijax
from bijax.ops.norm.norms import add_rms_norm
from bijax.ops.rotary.heads import rotate_and_store, rotate_heads

from ..routing import Routing
from .cache import rotate_and_store_in_8_bits
from .experts import experts, quantized_experts, route
from .invariant_linear_attention import InvariantLinearAttention


@dataclass(frozen=True)
class InvariantOps(InvariantLinearAttention):
    """Batch-invariant operations: the bits of a row do not depend on the batch, the padding and the cut of the work.

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
        """Multiplies rows x (M, K), sorted by group, by the weights w (G, K, N) of groups of these sizes."""
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
        """Returns x + residual, of one dtype, and its `rms_norm`."""
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
        """Selects experts (T, topk) by the router's products (T, E), float32; returns their weights (T, topk) too."""
        return route(logits, bias, routing)

    def experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Adds the results of each token's experts, times their weights."""
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

    def rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Rotates the pairs (x[i], x[i + H/2]) of x (B, T, N, H) by angles with cos and sin (B, T, H/2), float32."""
        return rotate_heads(x, cos, sin)

    def rotate_and_store(
        self,
        heads: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        rows: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        to_rotate: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotates the queries and keys in heads (B, T, N + 2 * K, H), and stores keys and values."""
        if scales is not None:
            return rotate_and_store_in_8_bits(rotate_heads, heads, cos, sin, rows, keys, values, to_rotate, scales)
        return rotate_and_store(heads, cos, sin, rows, keys, values, to_rotate=to_rotate)

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, H) to key and value (B, S, K, H)."""
        return bijax.dot_product_attention(
            query,
            key,
            value,
            scale=scale,
            is_causal=True,
            local_window_size=_before(window),
            logits_soft_cap=soft_cap,
            **_positions(start, lengths, key.shape[1]),
        )

    def paged_attention(
        self,
        query: jax.Array,
        key_pages: jax.Array,
        value_pages: jax.Array,
        page_table: jax.Array,
        *,
        start: jax.Array,
        lengths: jax.Array,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        common_prefix: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """The same with keys and values in pages (P, page size, K, H), listed by page_table (B, pages)."""
        return bijax.paged_attention(
            query,
            key_pages,
            value_pages,
            page_table,
            jnp.minimum(start + lengths, page_table.shape[1] * key_pages.shape[1]),
            scale=scale,
            local_window_size=_before(window),
            logits_soft_cap=soft_cap,
            query_offset=start,
            query_seq_lengths=lengths,
            common_prefix_length=common_prefix,
            key_scale=None if scales is None else scales[0],
            value_scale=None if scales is None else scales[1],
        )

    def latent_attention(
        self,
        query: jax.Array,
        latents: jax.Array,
        *,
        value_size: int,
        scale: float,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, W) to latents (B, S, W), whose first columns are the values."""
        positions = _positions(start, lengths, latents.shape[1])
        return bijax.latent_attention(query, latents, value_size=value_size, scale=scale, **positions)

    def paged_latent_attention(
        self,
        query: jax.Array,
        latent_pages: jax.Array,
        page_table: jax.Array,
        *,
        value_size: int,
        scale: float,
        start: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """The same with latents in pages (P, page size, W), listed by page_table (B, pages)."""
        return bijax.paged_latent_attention(
            query,
            latent_pages,
            page_table,
            jnp.minimum(start + lengths, page_table.shape[1] * latent_pages.shape[1]),
            value_size=value_size,
            scale=scale,
            query_offset=start,
            query_seq_lengths=lengths,
        )


def _positions(start: jax.Array | None, lengths: jax.Array | None, capacity: int) -> dict[str, Any]:
    """Returns the arguments for sequences in a cache; none for whole sequences."""
    if start is None or lengths is None:
        return {}
    return {
        "query_offset": start,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": jnp.minimum(start + lengths, capacity),
    }


def _before(window: int | None) -> tuple[int, int] | None:
    return None if window is None else (window - 1, 0)


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


INVARIANT = InvariantOps()
"""The operations of bijax."""
