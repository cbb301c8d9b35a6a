"""The states of a server's running sequences, stored in less memory than a layer of linear attention computes with."""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

import bijax
from pallas_kernels.delta_rule.slots import packed, taken

from .delta_net_state import DeltaNetState

SLOT_DRAFTS: Final = 7
"""Last tokens of a sequence in a slot that can be replaced, the most that an engine drafts."""


class DeltaNetSlots(NamedTuple):
    """States of sequences as `DeltaNetState`, one in each of S slots.

    Of the matrices that are lower triangular the zeros are not stored, and inputs of the convolution only for as many
    drafts as an engine has. Neither moves a bit. A state at the edge 0 is zero, whatever is stored.

    Attributes:
        state: (S, H, D, V) float32, see `bijax.DeltaRuleState`, like the next five.
        key: (S, J, 64, D).
        residual: (S, H, 64, V).
        triangle: (S, H, 32, 65) float32, `inverse`, see `packed`.
        decay: (S, H, 64) float32.
        edge: (S,) int32.
        length: (S,) int32.
        inputs: (S, conv_width + 6, channels), the last inputs of the convolution, by position.
    """

    state: jax.Array
    key: jax.Array
    residual: jax.Array
    triangle: jax.Array
    decay: jax.Array
    edge: jax.Array
    length: jax.Array
    inputs: jax.Array

    @classmethod
    def of(cls, states: DeltaNetState) -> "DeltaNetSlots":
        """Returns S states in slots; their inputs must have the room of a slot, see `slot_inputs`."""
        rule = states.rule
        return cls(
            rule.state, rule.key, rule.residual, packed(rule.inverse), rule.decay, rule.edge, rule.length, states.inputs
        )

    @property
    def rule(self) -> bijax.DeltaRuleState:
        """The states as `bijax.gated_delta_rule_extend` takes them with slots."""
        return bijax.DeltaRuleState(
            self.state, self.key, self.residual, self.triangle, self.decay, self.edge, self.length
        )

    def with_rule(self, rule: bijax.DeltaRuleState, inputs: jax.Array) -> "DeltaNetSlots":
        """Returns the slots with other states and inputs."""
        return DeltaNetSlots(
            rule.state, rule.key, rule.residual, rule.inverse, rule.decay, rule.edge, rule.length, inputs
        )

    def rows(self, slots: jax.Array, start: jax.Array) -> DeltaNetState:
        """Returns the states in some slots, empty for sequences that start at 0.

        Args:
            slots: (R,) int32; those out of range give any state.
            start: (R,) int32.
        """
        edge, length, inputs = (jnp.take(a, slots, axis=0, mode="clip") for a in (self.edge, self.length, self.inputs))
        edge, length = jnp.where(start == 0, 0, edge), jnp.where(start == 0, 0, length)
        stored = (self.state, self.key, self.residual, self.triangle, self.decay)
        state, key, residual, inverse, decay = taken(stored, edge, slots)
        return DeltaNetState(bijax.DeltaRuleState(state, key, residual, inverse, decay, edge, length), inputs)

    def with_rows(self, slots: jax.Array, rows: DeltaNetState) -> "DeltaNetSlots":
        """Returns the slots with other states in some of them.

        Args:
            slots: (R,) int32; states for slots out of range are dropped.
            rows: The states.
        """
        new = DeltaNetSlots.of(rows)
        return jax.tree.map(lambda a, x: a.at[slots].set(x, mode="drop"), self, new)


def slot_inputs(conv_width: int) -> int:
    """Returns how many inputs of a convolution a slot has room for."""
    return conv_width - 1 + SLOT_DRAFTS
