"""The operations of a hybrid model as one writes them in plain JAX: a recurrence for decoding, chunks for prompts.

`flax_layers.PLAIN` computes with the state of bijax, in which the last tokens can be replaced, and runs them again in
each step. Here the state of a sequence is one matrix for each head, as in other libraries.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp

import bijax
from benchmarks.cudnn_ops import CudnnOps
from flax_layers.ops import PlainOps

_CHUNK: Final = 64
_MOST_GATHERED: Final = 16
"""Expert weights that are copied for the tokens; for more all tokens go through all experts."""


@dataclass(frozen=True)
class RecurrentOps(PlainOps):
    """Stock JAX operations. A sequence whose state is used begins at 0 or has been decoded; it takes no token back."""

    def causal_conv(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns silu of the causal depthwise convolution of x (B, T, C) with weight (C, W)."""
        return _convolved(jnp.pad(x, ((0, 0), (weight.shape[1] - 1, 0), (0, 0))), weight)

    def causal_conv_extend(
        self, x: jax.Array, weight: jax.Array, inputs: jax.Array, **_: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The same for tokens of sequences; the last inputs are the first rows of `inputs`, the oldest first.

        No sequence is padded, and none has a slot.
        """
        before = weight.shape[1] - 1
        joined = jnp.concatenate([inputs[:, :before], x], axis=1)
        return _convolved(joined, weight), inputs.at[:, :before].set(joined[:, -before:])

    def gated_delta_rule(
        self, query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array
    ) -> jax.Array:
        """Returns what `bijax.gated_delta_rule` computes, over whole sequences."""
        heads, (batch, _, _, size) = value.shape[2], key.shape
        return chunked(query, key, value, g, beta, jnp.zeros((batch, heads, size, value.shape[3]), jnp.float32))[0]

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
        **_: Any,
    ) -> tuple[jax.Array, bijax.DeltaRuleState]:
        """Returns what `bijax.gated_delta_rule_extend` computes; `state.state` is the state after all tokens."""
        run = recurrent if value.shape[1] < _CHUNK else chunked
        y, after = run(query, key, value, g, beta, state.state)
        return y, replace(state, state=after, length=start + value.shape[1])

    def experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Adds the results of each token's experts, times their weights.

        Copies of the weights for one token, else all tokens by all experts: on a GPU `jax.lax.ragged_dot` does so too.
        """
        if selected.size <= _MOST_GATHERED:
            inner = _activation(jnp.einsum("tc,tkcf->tkf", x, gate_up[selected]))
            y = jnp.einsum("tkf,tkfc->tkc", inner, down[selected]).astype(jnp.float32)
            return (y * weights[..., None]).sum(1).astype(x.dtype)
        share = jnp.zeros((len(x), len(down)), jnp.float32).at[jnp.arange(len(x))[:, None], selected].set(weights)
        inner = _activation(jnp.einsum("tc,ecf->etf", x, gate_up))
        y = jnp.einsum("etf,efc->etc", inner, down)
        return jnp.einsum("etc,te->tc", y, share.astype(y.dtype), preferred_element_type=jnp.float32).astype(x.dtype)


class RecurrentCudnnOps(RecurrentOps, CudnnOps):
    """The same with cuDNN's attention."""


def recurrent(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule token by token; returns the outputs and the last state."""
    group, scale = value.shape[2] // key.shape[2], key.shape[-1] ** -0.5

    def step(s: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        q, k = (jnp.repeat(a.astype(jnp.float32), group, 1) for a in (q, k))
        s = s * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhd,bhdv->bhv", k, s))
        s = s + k[..., None] * u[:, :, None]
        return s, jnp.einsum("bhd,bhdv->bhv", q, s) * scale

    state, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value, g, beta)))
    return jnp.moveaxis(y, 0, 1).astype(value.dtype), state


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule in chunks of 64 tokens; returns the outputs and the last state.

    What the tokens of a chunk have between them is computed for all chunks at once, before the walk over the chunks.
    """
    (batch, total, heads, size), group, scale = value.shape, value.shape[2] // key.shape[2], key.shape[-1] ** -0.5

    def chunks(x: jax.Array) -> jax.Array:
        """(B, T, H, ...) as (chunks, B, H, 64, ...), with tokens that change nothing at the end."""
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -total % _CHUNK), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, -1, _CHUNK, *x.shape[2:]), (1, 3), (0, 2))

    q, k = (chunks(jnp.repeat(x, group, axis=2)) for x in (query, key))
    v, sums, b = chunks(value), jnp.cumsum(chunks(g), axis=-1), chunks(beta)[..., None]
    grown, last = jnp.exp(sums)[..., None], sums[..., -1:]
    age = jnp.tril(jnp.exp(jnp.tril(sums[..., :, None] - sums[..., None, :])))
    matrix = jnp.tril(b * (k @ k.mT) * age, -1) + jnp.eye(_CHUNK)
    ahead = jnp.concatenate([b * v, b * grown * k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(matrix, ahead, lower=True, unit_diagonal=True)
    later = k * jnp.exp(last - sums)[..., None]

    def step(s: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, w, q, weights, later, factor = chunk
        u = u - w @ s
        return s * factor + later.mT @ u, q @ s + weights @ u

    along = (solved[..., :size], solved[..., size:], q * grown * scale, (q @ k.mT) * age * scale, later)
    state, y = jax.lax.scan(step, state, (*along, jnp.exp(last)[..., None]))
    return jnp.moveaxis(y, (0, 2), (1, 3)).reshape(batch, -1, heads, size)[:, :total].astype(value.dtype), state


def _convolved(x: jax.Array, weight: jax.Array) -> jax.Array:
    """(B, W - 1 + T, C) to (B, T, C)."""
    width, wide = weight.shape[1], x.astype(jnp.float32)
    total = x.shape[1] - width + 1
    terms: list[Any] = [wide[:, j : j + total] * weight[:, j].astype(jnp.float32) for j in range(width)]
    return jax.nn.silu(sum(terms[1:], terms[0])).astype(x.dtype)


def _activation(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up
