"""The backward pass: tiles of queries loop over the blocks of keys that they see, and recompute the weights.

Gradients of queries are sums over key blocks, those of keys and values sums over query blocks, all upwards and at
absolute positions. A query that does not see a key adds an exact zero to its sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.blockwise.forward import from_rows, one_nan
from pallas_kernels.attention.blockwise.gradient_rows import Rows, Shared
from pallas_kernels.attention.blockwise.scores import ScoreArrays, block_scores, seen_keys
from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.programs import WITH_KEYS, WITH_VALUES, dot, seen_product, stacked
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.contract import AttentionContract
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class _Sums(NamedTuple):
    """Gradients so far: of the queries of a tile (1, K, R, H), of the keys and values (2, 1, K, n, H or V)."""

    query: jax.Array
    cache: jax.Array


def gradients(call: AttentionCall, results: AttentionResults, *, contract: AttentionContract, tile: Tile) -> Gradients:
    """Runs the backward pass over a contiguous cache, one sequence after the other.

    Args:
        call: The call, without pages.
        results: Its results.
        contract: Order of the sums.
        tile: One sequence, whole blocks of queries and of keys.

    Returns:
        Gradients of `query`, `key` and `value`, with their shapes and dtypes.
    """
    query, key, value = call.query, call.key, call.values
    length, capacity, heads = query.shape[1], *key.shape[1:3]
    limits = call.numbers()
    arrays = ScoreArrays.of(call, limits[0])
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    shared = Shared.of(call, results, limits, arrays, contract=contract, tile=tile)
    (scale,) = isolate(jnp.float32(call.options.scale))
    front = contract.query_block
    widest = max(key.shape[3], value.shape[3])

    def one_sequence(s: jax.Array) -> Gradients:
        own = shared.sequence(s)

        def tile_of_queries(i: jax.Array, sums: _Sums) -> _Sums:
            rows = own.tile_of_queries(i)
            dq, cache = _loop_over_keys(rows, sums.cache, s, shared)
            dq = from_rows(dq, tile.queries, rows.group)
            return _Sums(
                lax.dynamic_update_slice_in_dim(sums.query, dq, front + rows.begin, axis=1, **FROM_ZERO), cache
            )

        shape = (2, 1, heads, shared.keys, widest)
        start = _Sums(jnp.zeros((1, *own.rows[0].shape[1:]), jnp.float32), jnp.zeros(shape, jnp.float32))
        dq, (dk, dv) = lax.fori_loop(jnp.int32(0), own.tiles, tile_of_queries, start)
        dq, dk = isolate(dq * scale, dk[..., : key.shape[3]] * scale)
        dq = dq[:, front : front + length]
        dk, dv = (jnp.moveaxis(x, 1, 2)[:, :capacity] for x in (dk, dv[..., : value.shape[3]]))
        dq, dk, dv = (one_nan(g).astype(x.dtype) for g, x in zip((dq, dk, dv), (query, key, value), strict=True))
        return dq, dk, dv

    return _each_sequence(one_sequence, (query, key, value))


def score_gradients(
    call: AttentionCall, results: AttentionResults, *, contract: AttentionContract, tile: Tile
) -> jax.Array:
    """Returns the gradients (B, N, T, S) of what is added to the scores, float32; arguments as for `gradients`."""
    (batch, length, heads, _), capacity = call.query.shape, call.capacity
    limits = call.numbers()
    arrays = ScoreArrays.of(call, limits[0])
    zeros = jnp.zeros((batch, heads, length, capacity), jnp.float32)
    if call.is_empty:
        return zeros
    shared = Shared.of(call, results, limits, arrays, contract=contract, tile=tile)
    front, key_block = contract.query_block, contract.key_block

    def one_sequence(s: jax.Array) -> tuple[jax.Array]:
        own = shared.sequence(s)

        def tile_of_queries(i: jax.Array, found: jax.Array) -> jax.Array:
            rows = own.tile_of_queries(i)

            def block(j: jax.Array, found: jax.Array) -> jax.Array:
                start = j * key_block
                pair = _block(rows, shared.read_keys(s, j), shared.read_values(s, j), start, shared)
                slopes = jnp.moveaxis(from_rows(pair.slopes, tile.queries, rows.group), 2, 1)
                at = (jnp.int32(0), jnp.int32(0), front + rows.begin, start)
                return lax.dynamic_update_slice(found, one_nan(slopes), at, **FROM_ZERO)

            found = lax.fori_loop(*rows.queries.blocks(key_block), block, found)
            return found

        start = jnp.zeros((1, heads, own.rows[0].shape[1], shared.keys), jnp.float32)
        found = lax.fori_loop(jnp.int32(0), own.tiles, tile_of_queries, start)
        return (found[:, :, front : front + length, :capacity],)

    return _each_sequence(one_sequence, (zeros,))[0]


def _each_sequence(program: Callable[[jax.Array], Any], like: tuple[jax.Array, ...]) -> Any:
    """Returns the results (1, ...) of a program for each sequence, one after the other, as the arrays `like`."""
    batch = like[0].shape[0]
    if batch == 1:
        return program(jnp.int32(0))

    def body(s: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            lax.dynamic_update_slice_in_dim(r, g, s, axis=0, **FROM_ZERO)
            for r, g in zip(results, program(s), strict=True)
        )

    return lax.fori_loop(jnp.int32(0), jnp.int32(batch), body, tuple(jnp.zeros_like(x) for x in like))


def _loop_over_keys(rows: Rows, cache: jax.Array, sequence: jax.Array, shared: Shared) -> _Sums:
    """Loops over the blocks of keys that a tile of queries sees; `cache` has what other tiles gave keys and values."""
    key_block = shared.contract.key_block
    chain = shared.contract.chain_rows(rows.query.shape[2] // shared.tile.queries)

    def body(block: jax.Array, sums: _Sums) -> _Sums:
        start = block * key_block
        k, v = shared.read_keys(sequence, block), shared.read_values(sequence, block)
        here = _Sums(sums.query, lax.dynamic_slice_in_dim(sums.cache, start, key_block, axis=3, **FROM_ZERO))
        new = _block_gradients(here, rows, k, v, start, chain, shared)
        return _Sums(new.query, lax.dynamic_update_slice_in_dim(sums.cache, new.cache, start, axis=3, **FROM_ZERO))

    start = _Sums(jnp.zeros_like(rows.query), cache)
    if shared.tile.one_block:
        return body(jnp.int32(0), start)
    return lax.fori_loop(*rows.queries.blocks(key_block), body, start)


class _Pair(NamedTuple):
    """What a tile of queries and a block of keys have to do with each other, (1, K, R, n).

    Attributes:
        seen: Which keys the rows see, (1, K or 1, R, n).
        weights: Those of the forward pass, divided by their sum.
        slopes: Gradients of what is added to the scores.
        bent: Of the soft cap, or None.
    """

    seen: jax.Array
    weights: jax.Array
    slopes: jax.Array
    bent: jax.Array | None


def _block(rows: Rows, keys: jax.Array, values: jax.Array, start: jax.Array, shared: Shared) -> _Pair:
    """Computes the weights and slopes of a tile of queries and a block of keys (1, n, K, H) and values (1, n, K, V)."""
    given, fused = rows.given(start // shared.contract.key_block), shared.contract.fused
    seen = seen_keys(rows.seen, start, keys.shape[1], given.mask)
    scores, bent = block_scores(
        rows.query, keys, seen, start, shared.factor, given, shared.options.soft_cap, fused=fused
    )
    # With a bias a row may have nothing but scores of -inf.
    lse = jnp.where(rows.lse == -jnp.inf, jnp.float32(0), rows.lse) if given.given else rows.lse
    (weights,) = isolate(jnp.where(seen, jnp.exp(scores - lse[..., None]), jnp.float32(0)))
    slopes = dot(rows.cotangent, values, WITH_KEYS, fused=fused)
    (slopes,) = isolate(jnp.where(seen, weights * (slopes - rows.delta[..., None]), jnp.float32(0)))
    return _Pair(seen, weights, slopes, bent)


def _block_gradients(
    sums: _Sums, rows: Rows, keys: jax.Array, values: jax.Array, start: jax.Array, chain: int, shared: Shared
) -> _Sums:
    """Adds what a tile of queries and a block of keys have to do with each other."""
    keys, values, start = isolate(keys, values, start)
    seen, weights, slopes, bent = _block(rows, keys, values, start, shared)
    if bent is not None:
        (square,) = isolate(bent * bent)
        (slopes,) = isolate(jnp.where(seen, slopes * (1 - square), jnp.float32(0)))
    how = {"fused": shared.contract.fused, "finite": shared.tile.finite}
    query = sums.query + seen_product(slopes, seen, keys, WITH_VALUES, **how)

    def chains(*pair: jax.Array) -> jax.Array:
        # Keys and values take the same path, side by side: (2 or 1, 1, K, chains, rows of a chain, ...).
        widest = max(x.shape[3] for x in pair)
        x = stacked(*(jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[3])]) for x in pair))
        return x.reshape(*x.shape[:3], x.shape[3] // chain, chain, x.shape[4])

    partial = seen_product(
        chains(slopes, weights),
        chains(seen),
        chains(rows.query, rows.cotangent),
        (((4,), (4,)), ((0, 1, 2, 3), (0, 1, 2, 3))),
        **how,
    )
    cache = sums.cache
    for i in range(partial.shape[3]):
        cache = cache + partial[:, :, :, i]
    return _Sums(*isolate(query, cache))
