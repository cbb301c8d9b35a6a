"""From the arrays of a backward pass to its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.jax_triton._form import LOG2E, Form, Loop, form_of
from pallas_kernels.attention.jax_triton.launch import check, operands, padded, prepared, widest
from pallas_kernels.attention.mask_bounds import MaskBounds, mask_bounds
from pallas_kernels.attention.programs import row_products
from pallas_kernels.attention.schedule.jax_triton import BackwardTiles, Tile, backward_tiles
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target


@in_32_bits
def gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: MmaAttentionContract,
    target: Target,
    tiles: BackwardTiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        call: The call, without pages and without 8-bit keys.
        results: The results of the forward pass, and the gradient of the outputs.
        contract: Order of all sums.
        target: The GPU.
        tiles: The schedules; chosen by the width of a head by default.

    Returns:
        The gradients of queries, keys and values, with their shapes and dtypes.

    Raises:
        UnsupportedError: If the contract is of another kind or version, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    check(call, contract)
    query, key, value_size = call.query, call.key, call.value_size
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(call.values)
    from pallas_kernels.attention.jax_triton.backward import key_kernel, query_kernel

    (batch, length, _, size), (capacity, heads) = query.shape, key.shape[1:3]
    if tiles is None:
        tiles = backward_tiles(widest(call), query.dtype.itemsize, target.features)
    call = prepared(call)
    form = form_of(call, contract)
    arrays, of_results = operands(call), _of_results(results, form.heads)
    counts = -(-length * form.group // tiles.queries.rows), -(-capacity // tiles.keys.rows)
    (dq,) = launch(
        query_kernel,
        *arrays,
        *of_results,
        counts[0],
        target=target,
        out=[jax.ShapeDtypeStruct(call.query.shape, query.dtype)],
        grid=(batch * heads * counts[0],),
        **_schedule(tiles.queries, form),
    )
    dk, dv = launch(
        key_kernel,
        *arrays,
        *of_results,
        _queries_that_see(_what_is_seen(call), counts[1], tiles.keys.rows, capacity),
        counts[1],
        target=target,
        out=[jax.ShapeDtypeStruct((batch, capacity, heads, n), key.dtype) for n in (form.size, form.value_size)],
        grid=(batch * heads * counts[1],),
        **_schedule(tiles.keys, form),
    )
    return dq[..., :size], dk[..., :size], dv[..., :value_size]


@in_32_bits
def score_gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: MmaAttentionContract,
    target: Target,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes the gradients of the bias of the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Raises:
        UnsupportedError: If the contract is of another kind or version, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query.
    """
    check(call, contract)
    (batch, length, heads, _), capacity = call.query.shape, call.capacity
    if call.is_empty:
        return jnp.zeros((batch, heads, length, capacity), jnp.float32)
    from pallas_kernels.attention.jax_triton.backward import score_kernel

    if tile is None:
        tile = backward_tiles(widest(call), call.query.dtype.itemsize, target.features).scores
    call = prepared(call)
    count, form = -(-length // tile.rows), form_of(call, contract)
    (found,) = launch(
        score_kernel,
        *operands(call),
        *_of_results(results, form.heads),
        count,
        target=target,
        out=[jax.ShapeDtypeStruct((batch, heads, length, capacity), jnp.float32)],
        grid=(batch * heads * count,),
        **_schedule(tile, form),
    )
    return found


def _schedule(tile: Tile, form: Form) -> dict[str, Any]:
    constants = {"loop": Loop(tile.rows, tile.stages), "form": form}
    return {"warps": tile.warps, "stages": tile.stages, "fuses": False, "constants": constants}


def _of_results(results: AttentionResults, heads: int) -> tuple[jax.Array, ...]:
    """Returns the arrays of `Results`."""
    delta = row_products(results.cotangent.astype(jnp.float32), results.out.astype(jnp.float32))
    lse = jnp.where(results.lse == -jnp.inf, 0, results.lse * jnp.float32(LOG2E))
    return padded(results.cotangent), _by_key_heads(lse, heads), _by_key_heads(delta, heads)


def _by_key_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns numbers of rows (B, T, N) as (B, K, T * N / K), where rows of a key head are next to each other."""
    batch, length, all_heads = x.shape
    by_heads = x.reshape(batch, length, heads, all_heads // heads).transpose(0, 2, 1, 3)
    return by_heads.reshape(batch, heads, length * (all_heads // heads))


def _what_is_seen(call: AttentionCall) -> MaskBounds:
    """Returns what each query sees, before any mask."""
    (offsets, queries, keys), length = (jnp.maximum(x, 0) for x in call.numbers()), call.query.shape[1]
    indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (offsets.shape[0], length))
    within = jnp.minimum(queries, length), jnp.minimum(keys, call.capacity)
    return mask_bounds(offsets, *within, indices, causal=call.options.causal, window=call.options.window)


def _queries_that_see(seen: MaskBounds, tiles: int, keys: int, capacity: int) -> jax.Array:
    """Returns ranges of queries for each tile of keys, (B, tiles, 4) int32.

    They are the first query that sees any of its keys, the first that sees all, the end of those, and the end of those
    that see any.
    """
    start = jnp.arange(tiles, dtype=jnp.int32) * keys
    end = jnp.minimum(start + keys, capacity)
    first, last = seen.first[..., None], seen.last[..., None]
    some, every = (first < end) & (last > start), (first <= start) & (last >= end)
    index, length = jnp.arange(seen.first.shape[1], dtype=jnp.int32)[:, None], seen.first.shape[1]

    def begin(x: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(x, index, length), axis=1)

    def after(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(x, index + 1, 0), axis=1)

    return jnp.stack([begin(some), begin(every), after(every), jnp.maximum(begin(some), after(some))], axis=-1)
