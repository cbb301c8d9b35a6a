"""The backward kernels: rows walk the keys that they see, and keys the rows that see them. Weights are taken anew."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ops.attention.triton._scores import Scores, product_of_pieces, scores
from pallas_kernels.ops.attention.triton._tile import (
    Call,
    Parts,
    Refs,
    Rows,
    blocks_seen,
    dot,
    finite,
    keys_at,
    read_keys,
    read_rows,
    rows_at,
    split,
    split_all,
    write_rows,
)
from pallas_kernels.parts.triton.arithmetic import LOG2E, power_of_two, product


def query_kernel(refs: Refs, query_ref: Any, *, call: Call, count: int, tiles: int) -> None:
    """Computes the gradient of the queries of `count` rows.

    Args:
        refs: What it reads.
        query_ref: (B, T, N, H), the gradient.
        call: What is fixed.
        count: Rows of a tile.
        tiles: Tiles of a sequence and a key head; those with the most keys run first.
    """
    tile, sequence, head = _place(call, refs.first.shape[0])
    rows = rows_at(refs, call, sequence, head, (tiles - 1 - tile) * count, count)
    query, cotangent = (split_all(read_rows(ref, rows, call), call) for ref in (refs.query, refs.cotangent))
    lse, delta = _statistics(refs, rows, call)

    def block(i: Any, sums: list[jax.Array]) -> list[jax.Array]:
        keys = keys_at(refs, call, sequence, i * call.key_block, call.key_block)
        pieces = read_keys(refs.key, keys, head, call)
        values = split_all(read_keys(refs.value, keys, head, call), call)
        found = scores(refs, call, rows, keys, query, split_all(pieces, call))
        weights = _weights(found, lse, call)
        slopes = split(_bent(_slopes(weights, found, cotangent, values, delta, call), found, call), call)
        right = [split(finite(piece), call) for piece in pieces]
        return [dot(total, slopes, piece, (1, 0)) for total, piece in zip(sums, right, strict=True)]

    start = [jnp.zeros((count, width), jnp.float32) for _, width in call.pieces(call.size)]
    sums = lax.fori_loop(*blocks_seen(rows, call.key_block), block, start)
    write_rows(query_ref, rows, [product(x, jnp.float32(call.scale), call.interpret) for x in sums], call)


def key_kernel(refs: Refs, key_ref: Any, value_ref: Any, *, call: Call, count: int) -> None:
    """Computes the gradients of `count` keys and of their values.

    Args:
        refs: What it reads.
        key_ref: (B, S, K, H), the gradient of the keys.
        value_ref: (B, S, K, V), the gradient of the values.
        call: What is fixed.
        count: Keys of a tile.
    """
    tile, sequence, head = _place(call, refs.first.shape[0])
    keys = keys_at(refs, call, sequence, tile * count, count)
    key, value = (split_all(read_keys(ref, keys, head, call), call) for ref in (refs.key, refs.value))

    def block(i: Any, sums: Any) -> Any:
        rows = rows_at(refs, call, sequence, head, i * call.row_block, call.row_block, repeat_last=False)
        queries, cotangents = (read_rows(ref, rows, call) for ref in (refs.query, refs.cotangent))
        lse, delta = _statistics(refs, rows, call)
        query = split_all(queries, call)
        found = scores(refs, call, rows, keys, query, key, by_keys=True)
        weights = _weights(found, lse, call, by_keys=True)
        slopes = _slopes(weights, found, split_all(cotangents, call), value, delta, call, by_keys=True)
        slopes = _bent(slopes, found, call)
        # A cotangent that is not finite reaches the values that its row sees, and no others.
        weights = jnp.where(found.seen & ~(jnp.abs(delta) < jnp.inf)[None], jnp.nan, weights)
        of_keys, of_values = sums
        return [
            [dot(total, parts, split(finite(piece), call), (1, 0)) for total, piece in zip(totals, pieces, strict=True)]
            for totals, parts, pieces in (
                (of_keys, split(slopes, call), queries),
                (of_values, split(weights, call), cotangents),
            )
        ]

    zeros = [
        [jnp.zeros((count, width), jnp.float32) for _, width in call.pieces(size)]
        for size in (call.size, call.value_size)
    ]
    begin, end = (ref[sequence, tile] * call.group for ref in (refs.begin, refs.end))
    blocks = (begin // call.row_block, (end + (call.row_block - 1)) // call.row_block)
    of_keys, of_values = lax.fori_loop(*blocks, block, zeros)
    of_keys = [product(x, jnp.float32(call.scale), call.interpret) for x in of_keys]
    for ref, pieces in ((key_ref, of_keys), (value_ref, of_values)):
        for (start, width), piece in zip(call.pieces(ref.shape[3]), pieces, strict=True):
            at = (sequence, pl.ds(tile * count, count), head, slice(start, start + width))
            ref[at] = jnp.where(piece == 0, 0.0, piece).astype(ref.dtype)


def score_kernel(refs: Refs, out_ref: Any, *, call: Call, count: int, tiles: int) -> None:
    """Computes the gradients of what is added to the scores, for `count` queries of one head.

    Args:
        refs: What it reads.
        out_ref: (B, N, tiles of queries, blocks of keys) float32.
        call: What is fixed.
        count: Queries of a tile.
        tiles: Tiles of a sequence and a query head.
    """
    index = pl.program_id(0)
    tile = index % tiles
    query_head = index // tiles % (call.heads * call.group)
    sequence = index // tiles // (call.heads * call.group)
    head = query_head // call.group
    place = tile * count + lax.iota(jnp.int32, count)
    query = jnp.minimum(place, call.queries - 1)
    first, last = (jnp.where(place < call.queries, ref[sequence, query], 0) for ref in (refs.first, refs.last))
    rows = Rows(sequence, head, query, jnp.full((count,), query_head, jnp.int32), first, last)
    queries, cotangent = (split_all(read_rows(ref, rows, call), call) for ref in (refs.query, refs.cotangent))
    lse, delta = _statistics(refs, rows, call)

    def block(i: Any, _: Any) -> Any:
        keys = keys_at(refs, call, sequence, i * call.key_block, call.key_block)
        found = scores(refs, call, rows, keys, queries, split_all(read_keys(refs.key, keys, head, call), call))
        values = split_all(read_keys(refs.value, keys, head, call), call)
        slopes = _slopes(_weights(found, lse, call), found, cotangent, values, delta, call)
        at = (sequence, query_head, pl.ds(tile * count, count), pl.ds(i * call.key_block, call.key_block))
        out_ref[at] = jnp.where(slopes == 0, 0.0, slopes)
        return 0

    lax.fori_loop(0, out_ref.shape[3] // call.key_block, block, 0)


def _place(call: Call, sequences: int) -> tuple[Any, Any, Any]:
    """Returns the tile, the sequence and the key head of this block of threads."""
    index = pl.program_id(0)
    rest = index // call.heads
    return rest // sequences, rest % sequences, index % call.heads


def _statistics(refs: Refs, rows: Rows, call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns the log-sum-exp in units of ln(2), 0 for rows that see nothing, and delta."""
    lse, delta = (ref[rows.sequence, rows.query, rows.query_head] for ref in (refs.lse, refs.delta))
    return jnp.where(lse == -jnp.inf, 0.0, product(lse, LOG2E, call.interpret)), delta


def _weights(found: Scores, lse: jax.Array, call: Call, *, by_keys: bool = False) -> jax.Array:
    """Returns the weights of the forward pass, divided by their sum."""
    lse = lse[None] if by_keys else lse[:, None]
    return jnp.where(found.seen, power_of_two(found.masked - lse, call.interpret), 0.0)


def _slopes(
    weights: jax.Array,
    found: Scores,
    cotangent: list[Parts],
    value: list[Parts],
    delta: jax.Array,
    call: Call,
    *,
    by_keys: bool = False,
) -> jax.Array:
    """Returns the gradient of what is added to the scores."""
    slope = product_of_pieces(cotangent, value, by_keys=by_keys) - (delta[None] if by_keys else delta[:, None])
    return jnp.where(found.seen, product(weights, slope, call.interpret), 0.0)


def _bent(slopes: jax.Array, found: Scores, call: Call) -> jax.Array:
    """Returns the gradient of the scores before the soft cap, without their scale."""
    if found.bent is None:
        return slopes
    rest = 1.0 - product(found.bent, found.bent, call.interpret)
    return jnp.where(found.seen, product(slopes, rest, call.interpret), 0.0)
