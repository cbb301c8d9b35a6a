"""Writing the keys and values of tokens into the blocks of a cache: the place of each, and checks of the places."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import integer_array
from bijax.core.exact_sort import sort_tuples
from bijax.ops._engine_arguments import check_known, check_shape, is_known, narrowed
from bijax.ops._sequences import Tokens


@dataclass(frozen=True)
class Blocks:
    """The blocks of a cache, and which of them each slot has.

    Attributes:
        table: (slots, blocks of a slot) integers; a NumPy array if they are known.
        number: Blocks in the cache.
        size: Tokens that a block holds.
    """

    table: Any
    number: int
    size: int

    @property
    def capacity(self) -> int:
        """Tokens that a slot holds."""
        return int(self.table.shape[1]) * self.size

    @property
    def apart(self) -> bool:
        """Whether it is known that every entry of the table is a block of the cache, and each another one."""
        if not is_known(self.table):
            return False
        found = np.unique(self.table)
        return found.size == self.table.size and bool(((found >= 0) & (found < self.number)).all())


@dataclass(frozen=True)
class Targets:
    """Where the tokens go.

    Attributes:
        block: (T,) int32; outside the cache for tokens that are not written, each at a distinct index.
        offset: (T,) int32, the place in the block.
        stored: (B,) bool, whether the tokens of a sequence are written.
    """

    block: jax.Array
    offset: jax.Array
    stored: jax.Array


def find_targets(
    op: str, tokens: Tokens, blocks: Blocks, kv_ids: Any, kv_lens: Any, allowed: jax.Array | None
) -> Targets:
    """Finds the place of each token, after the tokens already in its slot.

    Args:
        op: Name of the operation.
        tokens: The sequences of the tokens.
        blocks: The blocks of the cache.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        kv_lens: (B,) ints, the tokens that each slot has already; 0 by default.
        allowed: Bool of the tokens' dimensions, False for one that cannot be stored; None if all can.

    Raises:
        TypeError: If ids or lengths are not integers.
        ValueError: If shapes do not fit, or known numbers lead outside the cache or to one place twice.
    """
    batch, slots = len(tokens.lengths), blocks.table.shape[0]
    ids = integer_array(op, "kv_ids", np.arange(batch, dtype=np.int32) if kv_ids is None else kv_ids)
    past = integer_array(op, "kv_lens", np.zeros(batch, np.int32) if kv_lens is None else kv_lens)
    for name, numbers in (("kv_ids", ids), ("kv_lens", past)):
        check_shape(op, name, numbers, (batch,), {})
    check_known(op, "kv_ids", ids, 0, slots - 1, "the slots of the cache")
    check_known(op, "kv_lens", past, 0, blocks.capacity, "the tokens that a slot holds")
    if tokens.known and is_known(past):
        check_known(op, "kv_lens + q_lens", past + tokens.lengths, 0, blocks.capacity, "the tokens that a slot holds")
        if is_known(ids, blocks.table):
            _check_places(op, blocks, ids, past, tokens.lengths)
    return _targets(tokens, blocks, narrowed(ids, 0, slots - 1), narrowed(past, 0, blocks.capacity), allowed)


def _check_places(op: str, blocks: Blocks, ids: Any, past: Any, lengths: Any) -> None:
    """Checks that each known place is in the cache, and that no two are one."""
    owner: dict[tuple[int, int], int] = {}
    for sequence, (slot, start, length) in enumerate(zip(ids, past, lengths, strict=True)):
        places = np.arange(start, start + length)
        found = blocks.table[slot, places // blocks.size]
        wrong = np.flatnonzero((found < 0) | (found >= blocks.number))
        if wrong.size:
            raise ValueError(
                f"{op}: block_table must hold blocks in [0, {blocks.number}) wherever tokens are written, got"
                f" {found[wrong[0]]} for slot {slot}, token {places[wrong[0]]}."
            )
        for place in zip(found.tolist(), (places % blocks.size).tolist(), strict=True):
            if place in owner:
                raise ValueError(
                    f"{op}: kv_ids, kv_lens and the blocks must lead every token to a place of its own, but sequences"
                    f" {owner[place]} and {sequence} both write token {place[1]} of block {place[0]}."
                )
            owner[place] = sequence


def _targets(tokens: Tokens, blocks: Blocks, ids: jax.Array, past: jax.Array, allowed: jax.Array | None) -> Targets:
    slot, start = tokens.of_tokens(ids, -1), tokens.of_tokens(past, -1)
    place = jnp.maximum(start, 0) + tokens.index
    inside = (slot >= 0) & (start >= 0) & (place < blocks.capacity)
    table = jnp.asarray(blocks.table)
    if 0 in table.shape:
        block = jnp.full(place.shape, -1, jnp.int32)
    else:
        at = jnp.where(inside, slot, 0), jnp.where(inside, place, 0) // max(blocks.size, 1)
        block = narrowed(table[at], 0, blocks.number - 1)
    offset = (place % max(blocks.size, 1)).reshape(-1)
    flat, sequence = tokens.inside.reshape(-1), tokens.sequence.reshape(-1)
    # Tokens that are not written get distinct places outside the cache.
    outside = blocks.number + jnp.arange(flat.size, dtype=jnp.int32)

    def drop(stored: jax.Array, of: jax.Array, wrong: jax.Array) -> jax.Array:
        """Takes out the sequences that have a wrong token."""
        return stored & (jnp.zeros(stored.shape, jnp.int32).at[of].max(wrong.astype(jnp.int32), mode="drop") == 0)

    def written(stored: jax.Array) -> jax.Array:
        return jnp.where(flat & _of(stored, sequence), block.reshape(-1), outside)

    stored = tokens.valid & (ids >= 0) & (past >= 0)
    if blocks.apart:
        # Tokens of a sequence then have distinct places, and errors show in the lengths.
        lengths = jnp.asarray(tokens.lengths)
        stored &= lengths <= blocks.capacity - past
        if allowed is not None:
            stored = drop(stored, sequence, flat & ~allowed.reshape(-1))
        stored &= ~_overlap(stored, ids, past, lengths)
        return Targets(written(stored), offset, stored)
    right = inside & (block >= 0)
    right = right if allowed is None else right & allowed
    stored = drop(stored, sequence, flat & ~right.reshape(-1))
    # Tokens with the same place are then adjacent; none of their sequences is stored.
    first, second, of = sort_tuples(written(stored), offset, sequence)
    twin = (first[1:] == first[:-1]) & (second[1:] == second[:-1])
    no = jnp.zeros((min(1, flat.size),), bool)
    stored = drop(stored, of, jnp.concatenate([no, twin]) | jnp.concatenate([twin, no]))
    return Targets(written(stored), offset, stored)


def _overlap(stored: jax.Array, ids: jax.Array, past: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns which of the sequences (B,) write to a place that another one writes to."""
    number = jnp.arange(ids.size, dtype=jnp.int32)
    others = (number[:, None] != number[None, :]) & stored[None, :] & (ids[:, None] == ids[None, :])
    later = past[:, None] < (past + lengths)[None, :]
    some = (lengths > 0)[:, None] & (lengths > 0)[None, :]
    return stored & jnp.any(others & later & later.T & some, axis=1)


def _of(stored: jax.Array, sequence: jax.Array) -> jax.Array:
    if stored.size == 0:
        return jnp.zeros(sequence.shape, bool)
    return jnp.take(stored, sequence, mode="clip")


def write(cache: jax.Array, rows: jax.Array, targets: Targets) -> jax.Array:
    """Returns the cache (blocks, heads, size, D) with the rows (T, heads, D) at their targets."""
    at = cache.at[targets.block, :, targets.offset]
    return at.set(rows, mode="drop", unique_indices=True)
