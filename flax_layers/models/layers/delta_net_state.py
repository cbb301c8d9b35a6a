"""What a layer of linear attention keeps of sequences, and snapshots of it."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

import bijax

from ...ops import Ops

MOST_DRAFTS: Final = 12
"""Last tokens of a sequence that can be replaced. The inputs of the convolution are kept for them."""

STATE_INTERVAL: Final = 64
"""Positions at which a snapshot can be taken are multiples of this, the length of a chunk of the gated delta rule."""


class DeltaNetState(NamedTuple):
    """What a `GatedDeltaNet` keeps of B sequences.

    Attributes:
        rule: The state of the gated delta rule.
        inputs: (B, S, channels), the last inputs of the convolution, by position mod S.
    """

    rule: bijax.DeltaRuleState
    inputs: jax.Array


class DeltaNetSnapshot(NamedTuple):
    """What continues B sequences after a multiple of 64 tokens, and nothing else.

    Attributes:
        state: (B, H, D, V) float32, the state of the gated delta rule.
        inputs: (B, W - 1, channels), the last inputs of the convolution.
    """

    state: jax.Array
    inputs: jax.Array

    @classmethod
    def of(cls, state: DeltaNetState, length: jax.Array, *, conv_width: int, ops: Ops) -> "DeltaNetSnapshot":
        """Returns the snapshots of sequences after `length` (B,) tokens, multiples of 64.

        The rule's state moves on when the token after an edge comes; so one is computed, and its result is dropped.

        Args:
            state: Of the sequences.
            length: (B,) int32, tokens that count; the state may have drafts after them.
            conv_width: Of the layer.
            ops: The operations of the layer.
        """
        rule = state.rule
        (batch, key_heads, _, key_size), (_, heads, _, size) = rule.key.shape, rule.residual.shape
        key = jnp.zeros((batch, 1, key_heads, key_size), rule.key.dtype)
        value, gates = jnp.zeros((batch, 1, heads, size), rule.residual.dtype), jnp.zeros((batch, 1, heads))
        one = jnp.ones(batch, jnp.int32)
        _, moved = ops.gated_delta_rule_extend(key, key, value, gates, gates, state=rule, start=length, lengths=one)
        return cls(moved.state, state.inputs[_rows(batch), _places(length, conv_width, state.inputs.shape[1])])

    def resume(self, length: jax.Array, *, key_heads: int, room: int) -> DeltaNetState:
        """Returns the states of sequences of `length` (B,) tokens that go on from these snapshots.

        Args:
            length: (B,) int32, multiples of 64.
            key_heads: Of the layer.
            room: Inputs of the convolution that the states hold.
        """
        (batch, before, channels), dtype = self.inputs.shape, self.inputs.dtype
        rule = bijax.DeltaRuleState.at_edge(self.state, length, key_heads=key_heads, dtype=dtype)
        places = _places(length, before + 1, room)
        inputs = jnp.zeros((batch, room, channels), dtype).at[_rows(batch), places].set(self.inputs)
        return DeltaNetState(rule, inputs)


def _rows(batch: int) -> jax.Array:
    return jnp.arange(batch)[:, None]


def _places(length: jax.Array, conv_width: int, size: int) -> Any:
    return (length[:, None] + jnp.arange(1 - conv_width, 0)) % size
