"""From the arrays of a backward pass to its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.mask_bounds import MaskBounds
from pallas_kernels.attention.pallas_triton._arrays import (
    arrays_of,
    check,
    launch_of,
    padded,
    refs_of,
    what_is_seen,
    widest,
)
from pallas_kernels.attention.pallas_triton.backward import key_kernel, query_kernel, score_kernel
from pallas_kernels.attention.programs import row_products
from pallas_kernels.attention.schedule.pallas_triton import AttentionTile, attention_tile
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.launch import launch


@in_32_bits
def gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: MmaAttentionContract,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        call: The call, without pages and without 8-bit keys.
        results: The results of the forward pass, and the gradient of the outputs.
        contract: Order of all sums.
        tile: Rows, warps and stages of the gradient of queries; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The gradients of queries, keys and values, with their shapes and dtypes.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    check(call, contract)
    query, key, value_size = call.query, call.key, call.value_size
    (batch, _, _, size), capacity = query.shape, key.shape[1]
    limits = call.numbers()
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(call.values)
    seen = what_is_seen(call, limits)
    given = arrays_of(call, seen, limits[0]) | _of_results(results)
    own = launch_of(call, given, contract.row_block, contract.row_block, interpret=interpret)
    tile = attention_tile(widest(call), query.dtype.itemsize, backward=True) if tile is None else tile
    tiles = -(-own.rows // tile.rows)

    def of_queries(*refs: Any) -> None:
        *read, gradient = refs
        query_kernel(refs_of(own, given, read), gradient, launch=own, count=tile.rows, tiles=tiles)

    options: dict[str, Any] = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    blocks = batch * own.heads * tiles
    result = jax.ShapeDtypeStruct(given["query"].shape, query.dtype)
    (dq,) = launch(of_queries, *given.values(), blocks=blocks, out=[result], **options)

    tiles = -(-capacity // tile.keys)
    given |= _queries_that_see(seen, tiles, tile.keys)

    def of_keys(*refs: Any) -> None:
        *read, of_key, of_value = refs
        key_kernel(refs_of(own, given, read), of_key, of_value, launch=own, count=tile.keys)

    shapes = [
        jax.ShapeDtypeStruct((batch, tiles * tile.keys, own.heads, n), key.dtype) for n in (own.size, own.value_size)
    ]
    dk, dv = launch(of_keys, *given.values(), blocks=batch * own.heads * tiles, out=shapes, **options)
    return dq[..., :size], dk[:, :capacity, :, :size], dv[:, :capacity, :, :value_size]


@in_32_bits
def score_gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: MmaAttentionContract,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes the gradients of the bias of the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query.
    """
    check(call, contract)
    (batch, length, heads, _), capacity, limits = call.query.shape, call.capacity, call.numbers()
    if call.is_empty:
        return jnp.zeros((batch, heads, length, capacity), jnp.float32)
    seen = what_is_seen(call, limits)
    given = arrays_of(call, seen, limits[0]) | _of_results(results)
    own = launch_of(call, given, contract.row_block, contract.row_block, interpret=interpret)
    tile = attention_tile(widest(call), call.query.dtype.itemsize, backward=True) if tile is None else tile
    tiles = -(-length // tile.rows)

    def kernel(*refs: Any) -> None:
        *read, found = refs
        score_kernel(refs_of(own, given, read), found, launch=own, count=tile.rows, tiles=tiles)

    shape = (batch, heads, tiles * tile.rows, -(-capacity // own.key_block) * own.key_block)
    (found,) = launch(
        kernel,
        *given.values(),
        blocks=batch * heads * tiles,
        out=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return found[:, :, :length, :capacity]


def _of_results(results: AttentionResults) -> dict[str, jax.Array]:
    delta = row_products(results.cotangent.astype(jnp.float32), results.out.astype(jnp.float32))
    return {"cotangent": padded(results.cotangent), "lse": results.lse, "delta": delta}


def _queries_that_see(seen: MaskBounds, tiles: int, keys: int) -> dict[str, jax.Array]:
    """Returns the range of queries that see any key of each tile, (B, tiles) int32."""
    start = jnp.arange(tiles, dtype=jnp.int32) * keys
    some = (seen.first[..., None] < start + keys) & (seen.last[..., None] > start)
    index = jnp.arange(seen.first.shape[1], dtype=jnp.int32)[:, None]
    begin = jnp.min(jnp.where(some, index, seen.first.shape[1]), axis=1)
    return {"begin": begin, "end": jnp.maximum(begin, jnp.max(jnp.where(some, index + 1, 0), axis=1))}
