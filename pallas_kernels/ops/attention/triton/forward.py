"""The forward kernel: a block of threads takes some rows of a sequence through all keys that they see."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ops.attention.triton._scores import scores
from pallas_kernels.ops.attention.triton._tile import (
    LEAST,
    SUMS,
    Call,
    Refs,
    add_rows,
    blocks_seen,
    dot,
    finite,
    keys_at,
    of_heads,
    read_keys,
    read_rows,
    rows_at,
    split,
    split_all,
    write_rows,
)
from pallas_kernels.parts.triton.arithmetic import LN2, LOG2E, power_of_two, product, quotient


def forward_kernel(refs: Refs, out_ref: Any, lse_ref: Any, *, call: Call, count: int, tiles: int) -> None:
    """Computes `count` rows.

    Args:
        refs: What it reads.
        out_ref: (B, T, N, V), the results.
        lse_ref: (B, T, N) float32, the log-sum-exp.
        call: What is fixed.
        count: Rows of a tile.
        tiles: Tiles of a sequence and a key head; those with the most keys run first.
    """
    index = pl.program_id(0)
    batches = index // call.heads
    head = index % call.heads
    sequences = refs.first.shape[0]
    sequence = batches % sequences
    tile = tiles - 1 - batches // sequences
    rows = rows_at(refs, call, sequence, head, tile * count, count)
    query = split_all(read_rows(refs.query, rows, call), call)

    def block(i: Any, state: Any) -> Any:
        maximum, total, *values = state
        keys = keys_at(refs, call, sequence, i * call.key_block, call.key_block)
        key = split_all(read_keys(refs.key, keys, head, call), call)
        found = scores(refs, call, rows, keys, query, key)
        highest = jnp.maximum(maximum, jnp.max(found.masked, axis=1))
        weights = power_of_two(found.masked - highest[:, None], call.interpret)
        decay = power_of_two(maximum - highest, call.interpret)[:, None]
        pieces = read_keys(refs.value, keys, head, call)
        # A value that is not finite makes the rows nan that see it, and no others.
        bad = jnp.zeros((call.key_block,), jnp.int32)
        for piece in pieces:
            bad = jnp.maximum(bad, jnp.max(jnp.where(jnp.abs(piece) < jnp.inf, 0, 1), axis=1))
        weights = jnp.where(found.seen & (bad[None] > 0), jnp.nan, weights)
        total = add_rows(product(total, decay, call.interpret), weights)
        parts = split(weights, call)
        values = [
            dot(product(old, decay, call.interpret), parts, split(finite(piece), call), (1, 0))
            for old, piece in zip(values, pieces, strict=True)
        ]
        return (highest, total, *values)

    start = (
        jnp.full((count,), LEAST, jnp.float32),
        jnp.zeros((count, SUMS), jnp.float32),
        *(jnp.zeros((count, width), jnp.float32) for _, width in call.pieces(call.value_size)),
    )
    maximum, sums, *values = lax.fori_loop(*blocks_seen(rows, call.key_block), block, start)
    total = jnp.max(sums, axis=1)
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    if refs.sinks is not None:
        sink = of_heads(refs.sinks, sequence, rows.query_head).astype(jnp.float32)
        sink = product(sink, LOG2E, call.interpret)
        highest = jnp.maximum(maximum, sink)
        decay = power_of_two(maximum - highest, call.interpret)
        total = product(total, decay, call.interpret) + power_of_two(sink - highest, call.interpret)
        values = [product(value, decay[:, None], call.interpret) for value in values]
        maximum = highest
    results = [quotient(value, total[:, None], call.interpret) for value in values]
    if refs.value_scale is not None:
        at = sequence if refs.value_scale.shape[0] > 1 else 0, head
        factors = [refs.value_scale[*at, start : start + width] for start, width in call.pieces(call.value_size)]
        results = [
            product(result.astype(call.dtype).astype(jnp.float32), factor[None], call.interpret)
            for result, factor in zip(results, factors, strict=True)
        ]
    write_rows(out_ref, rows, results, call)
    lse = product(maximum + jnp.log2(total), LN2, call.interpret)
    lse_ref[sequence, rows.query, rows.query_head] = jnp.where(nothing, -jnp.inf, lse)
