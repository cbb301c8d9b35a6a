"""The backward kernels: rows loop over the keys that they see, keys over the rows that see them.

Weights are recomputed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.pallas_triton._scores import Scores, product_of_pieces, scores
from pallas_kernels.attention.pallas_triton._tile import (
    Launch,
    Parts,
    Refs,
    Rows,
    blocks_seen,
    dot,
    finite,
    keys_at,
    read_keys,
    read_rows,
    read_values,
    rows_at,
    split,
    split_all,
    write_rows,
)
from pallas_kernels.parts.pallas_triton.arithmetic import LOG2E, power_of_two, product


def query_kernel(refs: Refs, query_ref: Any, *, launch: Launch, count: int, tiles: int) -> None:
    """Computes the gradient of the queries of `count` rows.

    Args:
        refs: The inputs.
        query_ref: (B, T, N, H), the gradient.
        launch: The static parameters.
        count: Rows of a tile.
        tiles: Tiles of a sequence and a key head; those with the most keys run first.
    """
    tile, sequence, head = _place(launch, refs.first.shape[0])
    rows = rows_at(refs, launch, sequence, head, (tiles - 1 - tile) * count, count)
    query, cotangent = (split_all(read_rows(ref, rows, launch), launch) for ref in (refs.query, refs.cotangent))
    lse, delta = _statistics(refs, rows, launch)

    def block(i: Any, sums: list[jax.Array]) -> list[jax.Array]:
        keys = keys_at(refs, launch, sequence, i * launch.key_block, launch.key_block)
        pieces = read_keys(refs.key, keys, head, launch)
        values = split_all(read_values(refs, keys, head, launch), launch)
        found = scores(refs, launch, rows, keys, query, split_all(pieces, launch))
        weights = _weights(found, lse, launch)
        slopes = split(_bent(_slopes(weights, found, cotangent, values, delta, launch), found, launch), launch)
        right = [split(finite(piece), launch) for piece in pieces]
        return [dot(total, slopes, piece, (1, 0)) for total, piece in zip(sums, right, strict=True)]

    start = [jnp.zeros((count, width), jnp.float32) for _, width in launch.pieces(launch.size)]
    sums = lax.fori_loop(*blocks_seen(rows, launch.key_block), block, start)
    write_rows(query_ref, rows, [product(x, jnp.float32(launch.options.scale), launch.interpret) for x in sums], launch)


def key_kernel(refs: Refs, key_ref: Any, value_ref: Any, *, launch: Launch, count: int) -> None:
    """Computes the gradients of `count` keys and of their values.

    Args:
        refs: The inputs.
        key_ref: (B, S, K, H), the gradient of the keys.
        value_ref: (B, S, K, V), the gradient of the values.
        launch: The static parameters.
        count: Keys of a tile.
    """
    tile, sequence, head = _place(launch, refs.first.shape[0])
    keys = keys_at(refs, launch, sequence, tile * count, count)
    key = split_all(read_keys(refs.key, keys, head, launch), launch)
    value = split_all(read_values(refs, keys, head, launch), launch)

    def block(i: Any, sums: Any) -> Any:
        rows = rows_at(refs, launch, sequence, head, i * launch.row_block, launch.row_block, repeat_last=False)
        queries, cotangents = (read_rows(ref, rows, launch) for ref in (refs.query, refs.cotangent))
        lse, delta = _statistics(refs, rows, launch)
        query = split_all(queries, launch)
        found = scores(refs, launch, rows, keys, query, key, by_keys=True)
        weights = _weights(found, lse, launch, by_keys=True)
        slopes = _slopes(weights, found, split_all(cotangents, launch), value, delta, launch, by_keys=True)
        slopes = _bent(slopes, found, launch)
        # A non-finite cotangent reaches only the values that its row sees.
        weights = jnp.where(found.seen & ~(jnp.abs(delta) < jnp.inf)[None], jnp.nan, weights)
        of_keys, of_values = sums
        return [
            [
                dot(total, parts, split(finite(piece), launch), (1, 0))
                for total, piece in zip(totals, pieces, strict=True)
            ]
            for totals, parts, pieces in (
                (of_keys, split(slopes, launch), queries),
                (of_values, split(weights, launch), cotangents),
            )
        ]

    zeros = [
        [jnp.zeros((count, width), jnp.float32) for _, width in launch.pieces(size)]
        for size in (launch.size, launch.value_size)
    ]
    begin, end = (ref[sequence, tile] * launch.group for ref in (refs.begin, refs.end))
    blocks = (begin // launch.row_block, (end + (launch.row_block - 1)) // launch.row_block)
    of_keys, of_values = lax.fori_loop(*blocks, block, zeros)
    of_keys = [product(x, jnp.float32(launch.options.scale), launch.interpret) for x in of_keys]
    for ref, pieces in ((key_ref, of_keys), (value_ref, of_values)):
        for (start, width), piece in zip(launch.pieces(ref.shape[3]), pieces, strict=True):
            at = (sequence, pl.ds(tile * count, count), head, slice(start, start + width))
            ref[at] = jnp.where(piece == 0, 0.0, piece).astype(ref.dtype)


def score_kernel(refs: Refs, out_ref: Any, *, launch: Launch, count: int, tiles: int) -> None:
    """Computes the gradients of the score bias for `count` queries of one head.

    Args:
        refs: The inputs.
        out_ref: (B, N, tiles of queries, blocks of keys) float32.
        launch: The static parameters.
        count: Queries of a tile.
        tiles: Tiles of a sequence and a query head.
    """
    index = pl.program_id(0)
    tile = index % tiles
    query_head = index // tiles % (launch.heads * launch.group)
    sequence = index // tiles // (launch.heads * launch.group)
    head = query_head // launch.group
    place = tile * count + lax.iota(jnp.int32, count)
    query = jnp.minimum(place, launch.queries - 1)
    first, last = (jnp.where(place < launch.queries, ref[sequence, query], 0) for ref in (refs.first, refs.last))
    rows = Rows(sequence, head, query, jnp.full((count,), query_head, jnp.int32), first, last)
    queries, cotangent = (split_all(read_rows(ref, rows, launch), launch) for ref in (refs.query, refs.cotangent))
    lse, delta = _statistics(refs, rows, launch)

    def block(i: Any, _: Any) -> Any:
        keys = keys_at(refs, launch, sequence, i * launch.key_block, launch.key_block)
        found = scores(refs, launch, rows, keys, queries, split_all(read_keys(refs.key, keys, head, launch), launch))
        values = split_all(read_values(refs, keys, head, launch), launch)
        slopes = _slopes(_weights(found, lse, launch), found, cotangent, values, delta, launch)
        at = (sequence, query_head, pl.ds(tile * count, count), pl.ds(i * launch.key_block, launch.key_block))
        out_ref[at] = jnp.where(slopes == 0, 0.0, slopes)
        return 0

    lax.fori_loop(0, out_ref.shape[3] // launch.key_block, block, 0)


def _place(launch: Launch, sequences: int) -> tuple[Any, Any, Any]:
    """Returns the tile, the sequence and the key head of this block of threads."""
    index = pl.program_id(0)
    rest = index // launch.heads
    return rest // sequences, rest % sequences, index % launch.heads


def _statistics(refs: Refs, rows: Rows, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """Returns the log-sum-exp in units of ln(2), 0 for rows that see nothing, and delta."""
    lse, delta = (ref[rows.sequence, rows.query, rows.query_head] for ref in (refs.lse, refs.delta))
    return jnp.where(lse == -jnp.inf, 0.0, product(lse, LOG2E, launch.interpret)), delta


def _weights(found: Scores, lse: jax.Array, launch: Launch, *, by_keys: bool = False) -> jax.Array:
    """Returns the weights of the forward pass, divided by their sum."""
    lse = lse[None] if by_keys else lse[:, None]
    return jnp.where(found.seen, power_of_two(found.masked - lse, launch.interpret), 0.0)


def _slopes(
    weights: jax.Array,
    found: Scores,
    cotangent: list[Parts],
    value: list[Parts],
    delta: jax.Array,
    launch: Launch,
    *,
    by_keys: bool = False,
) -> jax.Array:
    """Returns the gradient of the score bias."""
    slope = product_of_pieces(cotangent, value, by_keys=by_keys) - (delta[None] if by_keys else delta[:, None])
    return jnp.where(found.seen, product(weights, slope, launch.interpret), 0.0)


def _bent(slopes: jax.Array, found: Scores, launch: Launch) -> jax.Array:
    """Returns the gradient of the scores before the soft cap, without their scale."""
    if found.bent is None:
        return slopes
    rest = 1.0 - product(found.bent, found.bent, launch.interpret)
    return jnp.where(found.seen, product(slopes, rest, launch.interpret), 0.0)
