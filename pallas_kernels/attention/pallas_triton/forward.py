"""The forward kernel: a thread block processes some rows of a sequence over all keys that they see."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.pallas_triton._scores import scores
from pallas_kernels.attention.pallas_triton._tile import (
    LEAST,
    SUMS,
    Launch,
    Refs,
    add_rows,
    blocks_seen,
    dot,
    finite,
    keys_at,
    of_heads,
    read_keys,
    read_rows,
    read_values,
    rows_at,
    split,
    split_all,
    write_rows,
)
from pallas_kernels.parts.pallas_triton.arithmetic import LN2, LOG2E, power_of_two, product, quotient


def forward_kernel(refs: Refs, out_ref: Any, lse_ref: Any, *, launch: Launch, count: int, tiles: int) -> None:
    """Computes `count` rows.

    Args:
        refs: The inputs.
        out_ref: (B, T, N, V), the results.
        lse_ref: (B, T, N) float32, the log-sum-exp.
        launch: The static parameters.
        count: Rows of a tile.
        tiles: Tiles of a sequence and a key head; those with the most keys run first.
    """
    index = pl.program_id(0)
    batches = index // launch.heads
    head = index % launch.heads
    sequences = refs.first.shape[0]
    sequence = batches % sequences
    tile = tiles - 1 - batches // sequences
    rows = rows_at(refs, launch, sequence, head, tile * count, count)
    query = split_all(read_rows(refs.query, rows, launch), launch)

    def block(i: Any, state: Any) -> Any:
        maximum, total, *values = state
        keys = keys_at(refs, launch, sequence, i * launch.key_block, launch.key_block)
        key = split_all(read_keys(refs.key, keys, head, launch), launch)
        found = scores(refs, launch, rows, keys, query, key)
        highest = jnp.maximum(maximum, jnp.max(found.masked, axis=1))
        weights = power_of_two(found.masked - highest[:, None], launch.interpret)
        decay = power_of_two(maximum - highest, launch.interpret)[:, None]
        pieces = read_values(refs, keys, head, launch)
        # A non-finite value makes only the rows that see it nan.
        bad = jnp.zeros((launch.key_block,), jnp.int32)
        for piece in pieces:
            bad = jnp.maximum(bad, jnp.max(jnp.where(jnp.abs(piece) < jnp.inf, 0, 1), axis=1))
        weights = jnp.where(found.seen & (bad[None] > 0), jnp.nan, weights)
        total = add_rows(product(total, decay, launch.interpret), weights)
        parts = split(weights, launch)
        values = [
            dot(product(old, decay, launch.interpret), parts, split(finite(piece), launch), (1, 0))
            for old, piece in zip(values, pieces, strict=True)
        ]
        return (highest, total, *values)

    start = (
        jnp.full((count,), LEAST, jnp.float32),
        jnp.zeros((count, SUMS), jnp.float32),
        *(jnp.zeros((count, width), jnp.float32) for _, width in launch.pieces(launch.value_size)),
    )
    maximum, sums, *values = lax.fori_loop(*blocks_seen(rows, launch.key_block), block, start)
    total = jnp.max(sums, axis=1)
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    if refs.sinks is not None:
        sink = of_heads(refs.sinks, sequence, rows.query_head).astype(jnp.float32)
        sink = product(sink, LOG2E, launch.interpret)
        highest = jnp.maximum(maximum, sink)
        decay = power_of_two(maximum - highest, launch.interpret)
        total = product(total, decay, launch.interpret) + power_of_two(sink - highest, launch.interpret)
        values = [product(value, decay[:, None], launch.interpret) for value in values]
        maximum = highest
    results = [quotient(value, total[:, None], launch.interpret) for value in values]
    if refs.value_scale is not None:
        at = sequence if refs.value_scale.shape[0] > 1 else 0, head
        factors = [refs.value_scale[*at, start : start + width] for start, width in launch.pieces(launch.value_size)]
        results = [
            product(result.astype(launch.dtype).astype(jnp.float32), factor[None], launch.interpret)
            for result, factor in zip(results, factors, strict=True)
        ]
    write_rows(out_ref, rows, results, launch)
    lse = product(maximum + jnp.log2(total), LN2, launch.interpret)
    lse_ref[sequence, rows.query, rows.query_head] = jnp.where(nothing, -jnp.inf, lse)
