"""The arrays of two halves of a batch: rows, positions and pages of each, and the way back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bijax.parallel import BatchSplit

from .overlap_operations import Places


def child_rows(x: jax.Array, split: BatchSplit) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of each half of x (B, T, ...), padded at the end.

    A sequence that is cut has a row in both halves, in the second from its first token there.
    """
    sequences, tokens = split.sequences, split.tokens
    if not tokens:
        return x[:sequences], x[sequences:]
    # The last tokens of the row that is cut are padding in the first half.
    first = x[: sequences + 1] if sequences else x[:1, :tokens]
    chunk, others = x[sequences : sequences + 1, tokens:], x[sequences + 1 :]
    if not others.shape[0]:
        return first, chunk
    padding = [(0, 0), (0, tokens), *[(0, 0)] * (x.ndim - 2)]
    return first, jnp.concatenate([jnp.pad(chunk, padding), others])


def join_rows(first: jax.Array, second: jax.Array, split: BatchSplit, *, length: int) -> jax.Array:
    """Returns the tokens (B, T, ...) of two halves; the way back from `child_rows`, with `length` for T."""
    sequences, tokens = split.sequences, split.tokens
    if not tokens:
        return jnp.concatenate([first, second])
    whole = [jnp.concatenate([first[sequences:, :tokens], second[:1, : length - tokens]], axis=1)]
    if sequences:
        whole = [first[:sequences], *whole]
    return jnp.concatenate([*whole, second[1:]] if second.shape[0] > 1 else whole)


def child_places(places: Places, split: BatchSplit) -> tuple[Places, Places]:
    """Returns where the tokens of each half belong.

    Args:
        places: Of the whole batch.
        split: How it is split. A sequence that is cut has fewer tokens than `split.tokens` in the first half, and none
            in the second, where it is shorter.
    """
    sequences, tokens = split.sequences, split.tokens
    table, start, lengths, common, slots = places
    end = sequences + 1 if tokens else sequences
    in_first = jnp.minimum(lengths[sequences], tokens)
    short, later = lengths[:end], start[sequences:]
    rest = lengths[sequences:]
    if tokens:
        short = short.at[-1].set(in_first)
        later, rest = later.at[0].add(in_first), rest.at[0].add(-in_first)
    return (
        Places(table[:end], start[:end], short, common, None if slots is None else slots[:end]),
        Places(table[sequences:], later, rest, common, None if slots is None else slots[sequences:]),
    )
