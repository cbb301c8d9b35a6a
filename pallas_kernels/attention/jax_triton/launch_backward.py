"""From the arrays of a backward pass to its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.jax_triton._form import form_of
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
    form = form_of(call, contract.key_block, contract.row_block)
    arrays, of_results = operands(call), _of_results(results)
    counts = -(-length * form.group // tiles.queries.rows), -(-capacity // tiles.keys.rows)
    (dq,) = launch(
        query_kernel,
        *arrays,
        *of_results,
        counts[0],
        target=target,
        out=[jax.ShapeDtypeStruct(call.query.shape, query.dtype)],
        grid=(batch * heads * counts[0],),
        **_schedule(tiles.queries, ROWS=tiles.queries.rows, form=form),
    )
    dk, dv = launch(
        key_kernel,
        *arrays,
        *of_results,
        *_queries_that_see(_what_is_seen(call), counts[1], tiles.keys.rows),
        counts[1],
        target=target,
        out=[jax.ShapeDtypeStruct((batch, capacity, heads, n), key.dtype) for n in (form.size, form.value_size)],
        grid=(batch * heads * counts[1],),
        **_schedule(tiles.keys, KEYS=tiles.keys.rows, form=form),
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
        tile = backward_tiles(widest(call), call.query.dtype.itemsize, target.features).queries
    call = prepared(call)
    count = -(-length // tile.rows)
    (found,) = launch(
        score_kernel,
        *operands(call),
        *_of_results(results),
        count,
        target=target,
        out=[jax.ShapeDtypeStruct((batch, heads, length, capacity), jnp.float32)],
        grid=(batch * heads * count,),
        **_schedule(tile, ROWS=tile.rows, form=form_of(call, contract.key_block, contract.row_block)),
    )
    return found


def _schedule(tile: Tile, **constants: Any) -> dict[str, Any]:
    given = constants | {"STAGES": tile.stages}
    return {"warps": tile.warps, "stages": tile.stages, "fuses": False, "constants": given}


def _of_results(results: AttentionResults) -> tuple[jax.Array, ...]:
    delta = row_products(results.cotangent.astype(jnp.float32), results.out.astype(jnp.float32))
    return padded(results.cotangent), results.lse, delta


def _what_is_seen(call: AttentionCall) -> MaskBounds:
    """Returns what each query sees, before any mask."""
    (offsets, queries, keys), length = (jnp.maximum(x, 0) for x in call.numbers()), call.query.shape[1]
    indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (offsets.shape[0], length))
    within = jnp.minimum(queries, length), jnp.minimum(keys, call.capacity)
    return mask_bounds(offsets, *within, indices, causal=call.options.causal, window=call.options.window)


def _queries_that_see(seen: MaskBounds, tiles: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns the range of queries that see any key of each tile, (B, tiles) int32 each."""
    start = jnp.arange(tiles, dtype=jnp.int32) * keys
    some = (seen.first[..., None] < start + keys) & (seen.last[..., None] > start)
    index = jnp.arange(seen.first.shape[1], dtype=jnp.int32)[:, None]
    begin = jnp.min(jnp.where(some, index, seen.first.shape[1]), axis=1)
    return begin, jnp.maximum(begin, jnp.max(jnp.where(some, index + 1, 0), axis=1))
