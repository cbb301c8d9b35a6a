"""The operations in plain JAX, with no guarantee about bits."""

import functools
from dataclasses import dataclass
from typing import Any, override

import jax
import jax.numpy as jnp

from bijax.ops.rotary.heads import rotate_and_store_in_pieces, side_by_side

from ..routing import Routing
from .invariant import Ops
from .plain_experts import experts, route
from .plain_linear_attention import PlainLinearAttention


@dataclass(frozen=True)
class PlainOps(PlainLinearAttention, Ops):
    """Stock JAX operations. Their bits may change with the batch, the padding and the cut of the work.

    Example:
        >>> PLAIN.matmul(jnp.ones((2, 3)), jnp.ones((3, 1))).tolist()
        [[3.0], [3.0]]
    """

    @override
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
        # A dot that contracts the last dimension of w takes no transposed copy, and at one row it is the faster one.
        y = jnp.einsum(
            "...k,nk->...n" if transpose_w else "...k,kn->...n",
            x,
            w,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        return y if bias is None else y + bias

    @override
    def joined_matmul(self, x: jax.Array, w: jax.Array, other: jax.Array) -> jax.Array:
        y = [self.matmul(x, a, preferred_element_type=jnp.float32) for a in (w, other)]
        return jax.lax.stop_gradient(jnp.concatenate(y, axis=1))

    @override
    def known_matmul(self, x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        # The product again, as XLA has it by itself; the one that was computed before is left out.
        return self.matmul(x, w, preferred_element_type=jnp.float32)

    @override
    def head_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("btnk,nkm->btnm", x, w)

    @override
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
        rows, scale = _quantize(x if smooth_scale is None else x.astype(jnp.float32) * smooth_scale)
        total = jnp.einsum("...k,kn->...n", rows, weight, preferred_element_type=jnp.int32)
        y = total.astype(jnp.float32) * scale * weight_scale
        return (y if bias is None else y + bias).astype(preferred_element_type or x.dtype)

    @override
    def group_matmul(self, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, group_sizes)

    @override
    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # A negative index would count from the end.
        return jnp.take(table, jnp.where(tokens < 0, table.shape[0], tokens), axis=0, mode="fill", fill_value=jnp.nan)

    @override
    def rms_norm(self, x: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return (y if weight is None else y * (weight.astype(jnp.float32) + weight_offset)).astype(x.dtype)

    @override
    def add_rms_norm(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        h = x + residual.astype(x.dtype)
        return h, self.rms_norm(h, weight, eps=eps, weight_offset=weight_offset)

    @override
    def scale(self, x: jax.Array, factor: float) -> jax.Array:
        return x * jnp.asarray(factor, x.dtype)

    @override
    def log_softmax(self, x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(x, axis=-1)

    @override
    def soft_cap(self, x: jax.Array, cap: float) -> jax.Array:
        return cap * jnp.tanh(x / cap)

    @override
    def swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    @override
    def geglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.gelu(gate, approximate=True) * up

    @override
    def route(self, logits: jax.Array, bias: jax.Array | None, routing: Routing) -> tuple[jax.Array, jax.Array]:
        return route(logits, bias, routing)

    @override
    def experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        return experts(
            x,
            selected,
            weights,
            gate_up.shape[0],
            lambda rows, count: jax.lax.ragged_dot(rows, gate_up, count),
            lambda rows, count: jax.lax.ragged_dot(rows, down, count),
        )

    @override
    def quantized_experts(
        self,
        x: jax.Array,
        selected: jax.Array,
        weights: jax.Array,
        gate_up: tuple[jax.Array, jax.Array],
        down: tuple[jax.Array, jax.Array],
    ) -> jax.Array:

        def product(weight: jax.Array, scale: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
            quantized, row_scale = _quantize(rows)
            total = jax.lax.ragged_dot(quantized, weight, count, preferred_element_type=jnp.int32)
            columns = jnp.repeat(scale, count, axis=0, total_repeat_length=rows.shape[0])
            return (total.astype(jnp.float32) * row_scale * columns).astype(x.dtype)

        products = functools.partial(product, *gate_up), functools.partial(product, *down)
        return experts(x, selected, weights, gate_up[0].shape[0], *products)

    @override
    def rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    @override
    def _rotate_and_store(self, *arrays: Any, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, *others = arrays
        return rotate_and_store_in_pieces(self.rotate, side_by_side(heads, others[3].shape[2], groups), *others)

    @override
    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        page_table: jax.Array | None = None,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        common_prefix: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        if page_table is not None:
            key, value = _in_order(key, page_table), _in_order(value, page_table)
            options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "scales": scales}
            return self.attention(query, key, value, start=start, lengths=lengths, **options)
        if scales is not None:
            key, value = (
                (stored.astype(jnp.float32) * (scale if scale.ndim == 2 else scale[:, None])).astype(query.dtype)
                for stored, scale in zip((key, value), scales, strict=True)
            )
        # The causal mask hides the keys after a sequence's last query, and its padding is ignored.
        if soft_cap is not None:
            return _capped_attention(query, key, value, start, scale, window, soft_cap)
        if start is None:
            before = None if window is None else (window - 1, 0)
            return jax.nn.dot_product_attention(
                query, key, value, scale=scale, is_causal=True, local_window_size=before
            )
        visible = _visible(query, key, start, window)
        return jax.nn.dot_product_attention(query, key, value, scale=scale, mask=visible[:, None])

    @override
    def latent_attention(
        self,
        query: jax.Array,
        latents: jax.Array,
        *,
        value_size: int,
        scale: float,
        page_table: jax.Array | None = None,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        latents = latents if page_table is None else _in_order(latents, page_table)
        scores = jnp.einsum("btnw,bsw->bnts", query, latents, preferred_element_type=jnp.float32) * scale
        visible = _visible(query, latents, jnp.zeros(len(query), jnp.int32) if start is None else start, None)
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)).astype(latents.dtype)
        return jnp.einsum("bnts,bsv->btnv", weights, latents[..., :value_size])


def _in_order(pages: jax.Array, page_table: jax.Array) -> jax.Array:
    """Returns what is in the pages (P, page size, ...) of sequences, (B, pages * page size, ...)."""
    batch, number = page_table.shape
    return pages[page_table].reshape(batch, number * pages.shape[1], *pages.shape[2:])


def _visible(query: jax.Array, key: jax.Array, start: jax.Array, window: int | None) -> jax.Array:
    """Returns which keys (B, T, S) queries see."""
    positions = (start[:, None] + jnp.arange(query.shape[1]))[:, :, None]
    keys = jnp.arange(key.shape[1])
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def _capped_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    start: jax.Array | None,
    scale: float | None,
    window: int | None,
    soft_cap: float,
) -> jax.Array:
    """Attention with a soft cap, which `jax.nn.dot_product_attention` does not have."""
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], size)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * (size**-0.5 if scale is None else scale) / soft_cap)
    visible = _visible(query, key, jnp.zeros(batch, jnp.int32) if start is None else start, window)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def _quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of x (..., C) in int8, and the scale (..., 1) of each."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(wide / scale).astype(jnp.int8), scale


PLAIN = PlainOps()
"""Stock JAX operations, to compare with."""
