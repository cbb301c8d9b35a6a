"""All arguments of a call of the model in one array: a transfer costs the host the same, whatever its size.

As long as each sequence only gains one token, the device makes the next array itself, and none is sent.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Columns of a row of the array, all int32. They are followed by the row of `Slots` (the words of the seed, the bits of
# the temperature, the number of the slot, the adapter, the pages), and the tokens.
_CALL: Final = 4
_PARAMETERS: Final = 3
SLOT_COLUMNS: Final = _PARAMETERS + 2


class Given(NamedTuple):
    """The contents of the array.

    Attributes:
        tokens: (B, T) int32, with the last token of a sequence filled in for one that the host has not read.
        page_table: (B, n) int32.
        start: (B,) int32.
        lengths: (B,) int32.
        kept: (B,) int32, the slots that store sampled tokens; -1 for none.
        seeds: (B, 2) uint32.
        temperature: (B,) float32.
        slots: (B,) int32, the slot of each sequence; undefined for padding.
        adapters: (B,) int32, 0 for the model itself, i + 1 for its adapter i.
    """

    tokens: jax.Array
    page_table: jax.Array
    start: jax.Array
    lengths: jax.Array
    kept: jax.Array
    seeds: jax.Array
    temperature: jax.Array
    slots: jax.Array
    adapters: jax.Array


def pack(
    calls: Sequence[tuple[int, int, int, int]],
    slots: np.ndarray,
    tokens: Sequence[Sequence[int]],
    rows: int,
    width: int,
) -> np.ndarray:
    """Returns the array for `rows` rows of `width` tokens; rows after the calls are padding.

    Args:
        calls: For each sequence its tokens in the cache, the number of new ones, the slot whose last token replaces the
            passed one, and the slot that stores the sampled one; -1 for none.
        slots: Their rows of `Slots`.
        tokens: The new tokens of each.
        rows: B.
        width: T.
    """
    count, first = len(calls), _CALL + slots.shape[1]
    packed = np.zeros((rows, first + width), np.int32)
    packed[:count, :_CALL] = np.array(calls, np.int32).reshape(count, _CALL)
    packed[count:, 2:_CALL] = -1
    packed[:count, _CALL:first] = slots
    if width == 1:
        packed[:count, first] = [row[0] for row in tokens]
    else:
        for row, given in enumerate(tokens):
            packed[row, first : first + len(given)] = given
    return packed


def unpack(packed: jax.Array, last: jax.Array, *, table_width: int) -> Given:
    """Unpacks the array.

    Args:
        packed: The array.
        last: (S,) int32, the last token of each slot.
        table_width: Entries of a page table.
    """
    start, lengths, unread, kept = (packed[:, i] for i in range(_CALL))
    parameters = lax.bitcast_convert_type(packed[:, _CALL : _CALL + _PARAMETERS], jnp.uint32)
    first = _CALL + SLOT_COLUMNS
    table, tokens = packed[:, first : first + table_width], packed[:, first + table_width :]
    if tokens.shape[1] == 1:
        # -1 is sampled where the logits hold nan: the sequence ends there, and later results are dropped.
        tokens = jnp.where(unread[:, None] < 0, tokens, jnp.maximum(last[unread], 0)[:, None])
    temperature = lax.bitcast_convert_type(parameters[:, 2], jnp.float32)
    slots, adapters = (packed[:, _CALL + _PARAMETERS + i] for i in range(2))
    return Given(
        tokens,
        table,
        start,
        lengths,
        kept,
        seeds=parameters[:, :2],
        temperature=temperature,
        slots=slots,
        adapters=adapters,
    )


def one_step_on(packed: Any) -> Any:
    """Returns the array of the next step, in which each sequence continues with the one token that this one samples."""
    start, lengths, _, kept = (packed[:, i : i + 1] for i in range(_CALL))
    xp = np if isinstance(packed, np.ndarray) else jnp
    return xp.concatenate([start + lengths, lengths, kept, kept, packed[:, _CALL:-1], 0 * start], axis=1)
