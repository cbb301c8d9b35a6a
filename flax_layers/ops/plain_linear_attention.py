"""The operations of linear attention in plain JAX: chunked for whole sequences, recurrent for their continuation."""

import functools
from typing import Any, Final, override

import jax
import jax.numpy as jnp

import bijax
from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.delta_rule.slots import put_back, taken
from pallas_kernels.parts.xla.manual_axes import vary_as

from .linear_attention import LinearAttentionOps

_CHUNK: Final = 64


class PlainLinearAttention(LinearAttentionOps):
    """Stock JAX forms of `LinearAttentionOps`: the two forms that models are usually run in, whose bits differ."""

    @override
    def sigmoid_gate(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        return x * jax.nn.sigmoid(gate).astype(x.dtype)

    @override
    def causal_conv(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        before = weight.shape[1] - 1
        return _convolve(jnp.pad(x, ((0, 0), (before, 0), (0, 0))), weight)

    @override
    def causal_conv_extend(
        self,
        x: jax.Array,
        weight: jax.Array,
        inputs: jax.Array,
        *,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        (batch, total, _), size, before = x.shape, inputs.shape[1], weight.shape[1] - 1
        rows = (jnp.arange(batch) if slots is None else slots)[:, None]
        earlier = start[:, None] + jnp.arange(-before, 0)
        held = jnp.where((earlier >= 0)[..., None], inputs.at[rows, earlier % size].get(mode="clip"), 0)
        y = _convolve(jnp.concatenate([held, x], axis=1), weight)
        index = jnp.arange(total)
        stored = (index < lengths[:, None]) & (index >= lengths[:, None] - size)
        places = jnp.where(stored, (start[:, None] + index) % size, size)
        return y, inputs.at[rows, places].set(x, mode="drop")

    @override
    def conv_heads(self, x: jax.Array, weight: jax.Array, heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._heads_of(self.causal_conv(x[..., : heads.channels], weight), heads)

    @override
    def conv_heads_extend(
        self,
        x: jax.Array,
        weight: jax.Array,
        inputs: jax.Array,
        heads: Heads,
        *,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        places: dict[str, Any] = {"start": start, "lengths": lengths, "slots": slots}
        y, new = self.causal_conv_extend(x[..., : heads.channels], weight, inputs, **places)
        return self._heads_of(y, heads), new

    def _heads_of(self, y: jax.Array, heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = heads.split(y)
        return self.l2_norm(query), self.l2_norm(key), value

    @override
    def delta_gates(
        self, b: jax.Array, a: jax.Array, a_log: jax.Array, dt_bias: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        a, dt_bias = a.astype(jnp.float32), dt_bias.astype(jnp.float32)
        g = -jnp.exp(a_log.astype(jnp.float32)) * jax.nn.softplus(a + dt_bias)
        return g, jax.nn.sigmoid(b).astype(jnp.float32)

    @override
    def l2_norm(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    @override
    def gated_rms_norm(self, x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (y * weight.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)

    @override
    def gated_heads(self, x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        columns = x.shape[-2] * x.shape[-1]
        return self.gated_rms_norm(x, gate[..., -columns:].reshape(x.shape), weight, eps=eps)

    @override
    def gated_delta_rule(
        self, query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array
    ) -> jax.Array:
        (batch, total, heads, size), group = value.shape, value.shape[2] // key.shape[2]
        query, key = (jnp.repeat(x, group, axis=2) for x in (query, key))

        def chunks(x: jax.Array) -> jax.Array:
            """(B, T, H, ...) as (chunks, B, H, 64, ...), with tokens that change nothing at the end."""
            x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -total % _CHUNK), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(batch, -1, _CHUNK, *x.shape[2:]), (1, 3), (0, 2))

        step = functools.partial(_chunk, scale=key.shape[-1] ** -0.5)
        state = vary_as(jnp.zeros((batch, heads, key.shape[-1], size), jnp.float32), jax.typeof(value))
        _, y = jax.lax.scan(step, state, tuple(map(chunks, (query, key, value, g, beta))))
        return jnp.moveaxis(y, (0, 2), (1, 3)).reshape(batch, -1, heads, size)[:, :total].astype(value.dtype)

    @override
    def gated_delta_rule_extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        g: jax.Array,
        beta: jax.Array,
        *,
        state: bijax.DeltaRuleState,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, bijax.DeltaRuleState]:
        """Returns what `bijax.gated_delta_rule_extend` computes.

        The tokens after the edge are kept as they are, `residual` being their values and `inverse[..., 0]` their beta,
        and run again each time, so that drafts can be replaced.
        """
        if slots is not None:
            return self._extend_slots((query, key, value, g, beta), state, start, lengths, slots)
        end = start + lengths
        held = start - state.edge

        def joined(kept: jax.Array, new: jax.Array) -> jax.Array:
            """Puts the tokens after the edge (B, H, 64, ...) before new ones (B, T, H, ...), with a gap between."""
            return jnp.concatenate([jnp.moveaxis(kept, 1, 2).astype(new.dtype), new], axis=1)

        kept = (state.key, state.residual, state.decay, state.inverse[..., 0])
        keys, values, gates, betas = map(joined, kept, (key, value, g, beta))
        queries = jnp.pad(query, ((0, 0), (_CHUNK, 0), (0, 0), (0, 0)))
        index = jnp.arange(keys.shape[1])
        counts = jnp.where(index < _CHUNK, index < held[:, None], index - _CHUNK < lengths[:, None])
        positions = jnp.where(index < _CHUNK, state.edge[:, None] + index, start[:, None] + index - _CHUNK)
        edge = jnp.where(lengths > 0, jnp.maximum(end - 1, 0) // _CHUNK * _CHUNK, state.edge)
        along = [
            jnp.moveaxis(x, 1, 0) for x in (queries, keys, values, gates, betas, counts, positions == edge[:, None])
        ]
        (_, at_edge), y = jax.lax.scan(_token, (state.state, state.state), tuple(along))
        y = jnp.moveaxis(y, 0, 1)[:, _CHUNK:].astype(value.dtype)
        # The tokens after the new edge: where each was, among those that were kept and the new ones.
        place = edge[:, None] + jnp.arange(_CHUNK)
        source = jnp.where(place < start[:, None], place - state.edge[:, None], _CHUNK + place - start[:, None])
        source = jnp.clip(source, 0, keys.shape[1] - 1)
        found = [
            jnp.moveaxis(jnp.take_along_axis(x, source.reshape(*source.shape, *[1] * (x.ndim - 2)), axis=1), 1, 2)
            for x in (keys, values, gates, betas)
        ]
        new = bijax.DeltaRuleState(
            at_edge, found[0], found[1], state.inverse.at[..., 0].set(found[3]), found[2], edge, end
        )
        return y, new

    def _extend_slots(
        self,
        tokens: tuple[jax.Array, ...],
        kept: bijax.DeltaRuleState,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array,
    ) -> tuple[jax.Array, bijax.DeltaRuleState]:
        stored = (kept.state, kept.key, kept.residual, kept.inverse, kept.decay)
        edge = jnp.where(start == 0, 0, jnp.take(kept.edge, slots, mode="clip"))
        state, keys, residual, inverse, decay = taken(stored, edge, slots)
        rows = bijax.DeltaRuleState(state, keys, residual, inverse, decay, edge, start)
        y, after = self.gated_delta_rule_extend(*tokens, state=rows, start=start, lengths=lengths)
        new = (after.state, after.key, after.residual, after.inverse, after.decay)
        at = jnp.where(lengths > 0, slots, len(kept.edge))
        edge, length = kept.edge.at[at].set(after.edge, mode="drop"), kept.length.at[at].set(after.length, mode="drop")
        state, keys, residual, inverse, decay = put_back(stored, new, lengths, slots)
        return y, bijax.DeltaRuleState(state, keys, residual, inverse, decay, edge, length)


def _convolve(x: jax.Array, weight: jax.Array) -> jax.Array:
    kernel = weight.T[:, None].astype(x.dtype)
    y = jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )
    return jax.nn.silu(y)


def _chunk(state: jax.Array, tokens: tuple[jax.Array, ...], *, scale: float) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a chunk of 64 tokens (B, H, 64, ...), and their outputs."""
    query, key, value, g, beta = tokens
    total = jnp.cumsum(g, axis=-1)
    decay = jnp.tril(jnp.exp(jnp.tril(total[..., :, None] - total[..., None, :])))
    matrix = jnp.tril(beta[..., None] * (key @ key.mT) * decay, -1) + jnp.eye(_CHUNK)
    ahead = jnp.concatenate([beta[..., None] * value, (beta * jnp.exp(total))[..., None] * key], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(matrix, ahead, lower=True, unit_diagonal=True)
    size = value.shape[-1]
    update = solved[..., :size] - solved[..., size:] @ state
    y = scale * ((query * jnp.exp(total)[..., None]) @ state + ((query @ key.mT) * decay) @ update)
    last = total[..., -1:]
    return state * jnp.exp(last)[..., None] + (key * jnp.exp(last - total)[..., None]).mT @ update, y


def _token(
    states: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the state after a token (B, ...), that at the edge, and the token's output."""
    state, at_edge = states
    query, key, value, g, beta, counts, is_edge = token
    group = value.shape[1] // key.shape[1]
    query, key = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (query, key))
    at_edge = jnp.where((counts & is_edge)[:, None, None, None], state, at_edge)
    after = state * jnp.exp(g)[..., None, None]
    update = beta[..., None] * (value.astype(jnp.float32) - jnp.einsum("bhd,bhdv->bhv", key, after))
    after = after + key[..., None] * update[..., None, :]
    y = jnp.einsum("bhd,bhdv->bhv", query, after) * key.shape[-1] ** -0.5
    return (jnp.where(counts[:, None, None, None], after, state), at_edge), y
