"""The backward pass: tiles of queries walk the blocks of keys that they see, and recompute the weights.

Gradients of queries are sums over key blocks, those of keys and values sums over query blocks, all upwards and at
absolute positions. A query that does not see a key adds an exact zero to its sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.cpu._forward import from_rows, masked_scores, one_nan, rows_sight, seen_keys, to_rows
from pallas_kernels.ops.attention.cpu._keys import FetchBlock, contiguous_blocks
from pallas_kernels.ops.attention.cpu._score_arrays import NOTHING, ScoreArrays
from pallas_kernels.ops.attention.cpu._spec import AttentionSpec
from pallas_kernels.ops.attention.programs import dot, row_products, seen_product
from pallas_kernels.ops.attention.sight import Sight, sight
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.schedule.cpu.attention import Tile

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class _Rows(NamedTuple):
    """The rows of a tile of queries: (1, K, R, H), (1, K, R, H), (1, K, R), (1, K, R) and (1, R)."""

    query: jax.Array
    cotangent: jax.Array
    lse: jax.Array
    delta: jax.Array
    seen: Sight


class _Sums(NamedTuple):
    """Gradients so far: of the queries of a tile (1, K, R, H), of the keys and values (2, 1, K, n, H)."""

    query: jax.Array
    cache: jax.Array


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    arrays: ScoreArrays = NOTHING,
    *,
    spec: AttentionSpec,
    tile: Tile,
) -> Gradients:
    """Runs the backward pass over a contiguous cache, one sequence after the other.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, H).
        out: (B, T, N, H), the result of the forward pass.
        lse: (B, T, N) float32, its log-sum-exp.
        cotangent: (B, T, N, H), the gradient of `out`.
        offsets: (B,) int32.
        query_lengths: (B,) int32.
        key_lengths: (B,) int32.
        arrays: Bias and mask.
        spec: Order of the sums, scale and mask.
        tile: One sequence, whole blocks of queries and of keys.

    Returns:
        Gradients of `query`, `key` and `value`, of their shapes and dtypes.
    """
    batch, length, query_heads, _ = query.shape
    capacity, heads = key.shape[1:3]
    if 0 in query.shape or 0 in key.shape:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    front = spec.contract.query_block
    query_lengths = jnp.minimum(query_lengths, length)
    key_lengths = jnp.minimum(key_lengths, capacity)
    group = query_heads // heads
    (factor,) = isolate(jnp.float32(spec.scale))
    arrays = arrays.padded(front, tile.queries, spec.contract.key_block)
    read_keys, read_values = (contiguous_blocks(x, tile, spec.contract.key_block) for x in (key, value))

    def one_sequence(s: jax.Array) -> Gradients:
        own = tuple(_padded_sequence(x, s, front, tile.queries) for x in (query, cotangent, out, lse))
        offset, used, keys = (lax.dynamic_slice_in_dim(x, s, 1) for x in (offsets, query_lengths, key_lengths))
        # The first tile begins at the edge of a query block, so up to `front` - 1 rows before the first query.
        before = offset[0] % front

        def tile_of_queries(i: jax.Array, sums: _Sums) -> _Sums:
            begin = i * tile.queries - before
            indices = begin + jnp.arange(tile.queries, dtype=jnp.int32)[None]
            seen = sight(offset, used, keys, indices, causal=spec.causal, window=spec.window)
            q, ct, o, stat = (
                to_rows(lax.dynamic_slice_in_dim(x, front + begin, tile.queries, axis=1).astype(jnp.float32), heads)
                for x in own
            )
            q, ct, stat, delta = isolate(q, ct, stat, row_products(ct, o))
            rows = _Rows(q, ct, stat, delta, Sight(*isolate(*rows_sight(seen, group))))

            def given(block: jax.Array) -> ScoreArrays:
                part = arrays.block(s, front + begin, block * spec.contract.key_block, tile)
                return part.by_rows(heads, tile, query_heads, q.shape[2])

            dq, cache = _walk_keys(rows, seen, sums.cache, s, read_keys, read_values, given, factor, spec, tile)
            dq = from_rows(dq, tile.queries, group)
            return _Sums(lax.dynamic_update_slice_in_dim(sums.query, dq, front + begin, axis=1), cache)

        blocks = -(-capacity // spec.contract.key_block) * spec.contract.key_block
        start = _Sums(
            jnp.zeros((1, *own[0].shape[1:]), jnp.float32), jnp.zeros((2, 1, heads, blocks, key.shape[3]), jnp.float32)
        )
        tiles = (before + used[0] + (tile.queries - 1)) // tile.queries
        dq, (dk, dv) = lax.fori_loop(jnp.int32(0), tiles, tile_of_queries, start)
        dq, dk = isolate(dq * factor, dk * factor)
        dq = dq[:, front : front + length]
        dk, dv = (jnp.moveaxis(x, 1, 2)[:, :capacity] for x in (dk, dv))
        dq, dk, dv = (one_nan(g).astype(x.dtype) for g, x in zip((dq, dk, dv), (query, key, value), strict=True))
        return dq, dk, dv

    if batch == 1:
        return one_sequence(jnp.int32(0))

    def body(s: jax.Array, results: Gradients) -> Gradients:
        dq, dk, dv = (
            lax.dynamic_update_slice_in_dim(r, g, s, axis=0) for r, g in zip(results, one_sequence(s), strict=True)
        )
        return dq, dk, dv

    zeros = (jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value))
    results: Gradients = lax.fori_loop(jnp.int32(0), jnp.int32(batch), body, zeros)
    return results


def _padded_sequence(x: jax.Array, s: jax.Array, front: int, back: int) -> jax.Array:
    one = lax.dynamic_slice_in_dim(x, s, 1, axis=0)
    return jnp.pad(one, [(0, 0), (front, back)] + [(0, 0)] * (x.ndim - 2))


def _walk_keys(
    rows: _Rows,
    seen: Sight,
    cache: jax.Array,
    sequence: jax.Array,
    read_keys: FetchBlock,
    read_values: FetchBlock,
    given: Callable[[jax.Array], ScoreArrays],
    factor: jax.Array,
    spec: AttentionSpec,
    tile: Tile,
) -> _Sums:
    """Walks the blocks of keys that a tile of queries sees; `cache` is what other tiles gave to keys and values."""
    key_block = spec.contract.key_block
    chain = spec.contract.chain_rows(rows.query.shape[2] // tile.queries)

    def body(block: jax.Array, sums: _Sums) -> _Sums:
        start = block * key_block
        k, v = read_keys(sequence, block), read_values(sequence, block)
        here = _Sums(sums.query, lax.dynamic_slice_in_dim(sums.cache, start, key_block, axis=3))
        new = _block_gradients(here, rows, k, v, given(block), start, factor, chain)
        return _Sums(new.query, lax.dynamic_update_slice_in_dim(sums.cache, new.cache, start, axis=3))

    sums: _Sums = lax.fori_loop(*seen.blocks(key_block), body, _Sums(jnp.zeros_like(rows.query), cache))
    return sums


def _block_gradients(
    sums: _Sums,
    rows: _Rows,
    keys: jax.Array,
    values: jax.Array,
    given: ScoreArrays,
    start: jax.Array,
    factor: jax.Array,
    chain: int,
) -> _Sums:
    """Adds what a tile of queries and a block of keys (1, n, K, H) have to do with each other."""
    keys, values, start, factor = isolate(keys, values, start, factor)
    seen = seen_keys(rows.seen, start, keys.shape[1], given.mask)
    scores = masked_scores(rows.query, keys, seen, factor, given.bias)
    # With a bias a row may have nothing but scores of -inf.
    lse = jnp.where(rows.lse == -jnp.inf, jnp.float32(0), rows.lse) if given.given else rows.lse
    (weights,) = isolate(jnp.where(seen, jnp.exp(scores - lse[..., None]), jnp.float32(0)))
    slopes = dot(rows.cotangent, values, (((3,), (3,)), ((0, 1), (0, 2))))
    (slopes,) = isolate(jnp.where(seen, weights * (slopes - rows.delta[..., None]), jnp.float32(0)))
    seen = jnp.broadcast_to(seen, weights.shape)
    query = sums.query + seen_product(slopes, seen, keys, (((3,), (1,)), ((0, 1), (0, 2))))

    def chains(*pair: jax.Array) -> jax.Array:
        # Keys and values take the same path, side by side: (2, 1, K, chains, rows of a chain, ...).
        x = jnp.stack(pair)
        return x.reshape(*x.shape[:3], x.shape[3] // chain, chain, x.shape[4])

    partial = seen_product(
        chains(slopes, weights),
        chains(seen, seen),
        chains(rows.query, rows.cotangent),
        (((4,), (4,)), ((0, 1, 2, 3), (0, 1, 2, 3))),
    )
    cache = sums.cache
    for i in range(partial.shape[3]):
        cache = cache + partial[:, :, :, i]
    return _Sums(*isolate(query, cache))
