"""The states of a server's running sequences, stored in less memory than a layer of linear attention computes with."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

import bijax

from .delta_net_state import DeltaNetState

SLOT_DRAFTS: Final = 7
"""Last tokens of a sequence in a slot that can be replaced, the most that an engine drafts."""


class DeltaNetSlots(NamedTuple):
    """States of sequences as `DeltaNetState`, one in each of S slots.

    Of the matrices that are lower triangular the zeros are not stored, and inputs of the convolution only for as many
    drafts as an engine has. Neither moves a bit.

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

    def rows(self, slots: jax.Array, start: jax.Array) -> DeltaNetState:
        """Returns the states in some slots, empty for sequences that start at 0.

        Args:
            slots: (R,) int32; those out of range give any state.
            start: (R,) int32.
        """
        found: DeltaNetSlots = jax.tree.map(lambda a: jnp.take(a, slots, axis=0, mode="clip"), self)
        fresh = start == 0
        rule = bijax.DeltaRuleState(
            state=jnp.where(fresh[:, None, None, None], 0, found.state),
            key=found.key,
            residual=found.residual,
            inverse=unpacked(found.triangle),
            decay=found.decay,
            edge=jnp.where(fresh, 0, found.edge),
            length=jnp.where(fresh, 0, found.length),
        )
        return DeltaNetState(rule, found.inputs)

    def with_rows(self, slots: jax.Array, rows: DeltaNetState, lengths: jax.Array | None = None) -> "DeltaNetSlots":
        """Returns the slots with other states in some of them.

        Args:
            slots: (R,) int32; states for slots out of range are dropped.
            rows: The states.
            lengths: (R,) int32, tokens that were added; states without are dropped, since they are padding.
        """
        new = DeltaNetSlots.of(rows)
        slots = slots if lengths is None else jnp.where(lengths > 0, slots, len(self.inputs))
        found: DeltaNetSlots = jax.tree.map(lambda a, x: a.at[slots].set(x, mode="drop"), self, new)
        return found


def slot_inputs(conv_width: int) -> int:
    """Returns how many inputs of a convolution a slot has room for."""
    return conv_width - 1 + SLOT_DRAFTS


def packed(matrices: jax.Array) -> jax.Array:
    """Returns lower triangular matrices (..., N, N) as (..., N / 2, N + 1), without the zeros; N is even.

    Row r holds row N / 2 + r, of N / 2 + r + 1 numbers, and then row N / 2 - 1 - r backwards, of N / 2 - r numbers.

    Example:
        >>> packed(jnp.array([[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]])).tolist()
        [[4, 5, 6, 3, 2], [7, 8, 9, 10, 1]]
    """
    half = matrices.shape[-1] // 2
    upper, lower = matrices[..., :half, :], matrices[..., half:, :]
    none = [(0, 0)] * (matrices.ndim - 1)
    upper, lower = jnp.pad(upper[..., ::-1, ::-1], [*none, (1, 0)]), jnp.pad(lower, [*none, (0, 1)])
    return jnp.where(_is_lower(half), lower, upper)


def unpacked(triangles: jax.Array) -> jax.Array:
    """Returns the matrices (..., N, N) of `packed`, with zeros above the diagonals.

    Example:
        >>> unpacked(jnp.array([[4, 5, 6, 3, 2], [7, 8, 9, 10, 1]])).tolist()
        [[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]]
    """
    lower = _is_lower(triangles.shape[-2])
    of_lower, of_upper = jnp.where(lower, triangles, 0)[..., :-1], jnp.where(lower, 0, triangles)[..., 1:]
    return jnp.concatenate([of_upper[..., ::-1, ::-1], of_lower], axis=-2)


def _is_lower(half: int) -> Any:
    """Returns which numbers of `packed` are of the lower half of the rows, (N / 2, N + 1)."""
    row, column = jnp.arange(half)[:, None], jnp.arange(2 * half + 1)
    return column <= half + row
