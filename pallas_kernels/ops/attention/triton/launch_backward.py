"""From the arrays of a backward pass to its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.ops.attention.programs import row_products
from pallas_kernels.ops.attention.sight import Sight
from pallas_kernels.ops.attention.triton._arrays import arrays_of, call_of, check, padded, refs_of, what_is_seen
from pallas_kernels.ops.attention.triton.backward import key_kernel, query_kernel, score_kernel
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.triton.launch import launch
from pallas_kernels.schedule.triton.attention import AttentionTile, attention_tile


@in_32_bits
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
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    slopes: jax.Array | None = None,
    *,
    contract: MmaAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, V).
        out: (B, T, N, V), the result of the forward pass.
        lse: (B, T, N) float32, its log-sum-exp.
        cotangent: (B, T, N, V), the gradient of `out`.
        offsets: (B,) int32.
        query_lengths: (B,) int32.
        key_lengths: (B,) int32.
        bias: As in `attention`.
        mask: As in `attention`.
        slopes: As in `attention`.
        contract: Order of all sums.
        scale: Factor of the scores.
        causal: As in `attention`.
        window: As in `attention`.
        soft_cap: As in `attention`.
        tile: Rows, warps and stages of the gradient of queries; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The gradients of `query`, `key` and `value`, of their shapes and dtypes.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 512.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    (batch, length, _, size), (capacity, _, value_size) = query.shape, value.shape[1:]
    check(contract, max(size, value_size))
    if 0 in query.shape or 0 in key.shape or not value_size:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    seen = what_is_seen(length, capacity, offsets, query_lengths, key_lengths, causal, window)
    given = arrays_of(query, key, value, seen, bias, mask, slopes, offsets) | _of_results(out, lse, cotangent)
    call = call_of(given, contract.row_block, contract.row_block, scale, soft_cap, capacity, interpret)
    tile = attention_tile(max(size, value_size), query.dtype.itemsize, backward=True) if tile is None else tile
    tiles = -(-call.rows // tile.rows)

    def of_queries(*refs: Any) -> None:
        *read, gradient = refs
        query_kernel(refs_of(given, read), gradient, call=call, count=tile.rows, tiles=tiles)

    options: dict[str, Any] = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    blocks = batch * call.heads * tiles
    result = jax.ShapeDtypeStruct(given["query"].shape, query.dtype)
    (dq,) = launch(of_queries, *given.values(), blocks=blocks, out=[result], **options)

    tiles = -(-capacity // tile.keys)
    given |= _queries_that_see(seen, tiles, tile.keys)

    def of_keys(*refs: Any) -> None:
        *read, of_key, of_value = refs
        key_kernel(refs_of(given, read), of_key, of_value, call=call, count=tile.keys)

    results = [
        jax.ShapeDtypeStruct((batch, tiles * tile.keys, call.heads, n), key.dtype) for n in (call.size, call.value_size)
    ]
    dk, dv = launch(of_keys, *given.values(), blocks=batch * call.heads * tiles, out=results, **options)
    return dq[..., :size], dk[:, :capacity, :, :size], dv[:, :capacity, :, :value_size]


@in_32_bits
def score_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    slopes: jax.Array | None = None,
    *,
    contract: MmaAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes the gradients of what is added to the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 512.

    Guarantee: row-invariant; a row is a query.
    """
    (batch, length, heads, size), (capacity, _, value_size) = query.shape, value.shape[1:]
    check(contract, max(size, value_size))
    if 0 in query.shape or 0 in key.shape or not value_size:
        return jnp.zeros((batch, heads, length, capacity), jnp.float32)
    seen = what_is_seen(length, capacity, offsets, query_lengths, key_lengths, causal, window)
    given = arrays_of(query, key, value, seen, bias, mask, slopes, offsets) | _of_results(out, lse, cotangent)
    call = call_of(given, contract.row_block, contract.row_block, scale, soft_cap, capacity, interpret)
    tile = attention_tile(max(size, value_size), query.dtype.itemsize, backward=True) if tile is None else tile
    tiles = -(-length // tile.rows)

    def kernel(*refs: Any) -> None:
        *read, found = refs
        score_kernel(refs_of(given, read), found, call=call, count=tile.rows, tiles=tiles)

    shape = (batch, heads, tiles * tile.rows, -(-capacity // call.key_block) * call.key_block)
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


def _of_results(out: jax.Array, lse: jax.Array, cotangent: jax.Array) -> dict[str, jax.Array]:
    delta = row_products(cotangent.astype(jnp.float32), out.astype(jnp.float32))
    return {"cotangent": padded(cotangent), "lse": lse, "delta": delta}


def _queries_that_see(seen: Sight, tiles: int, keys: int) -> dict[str, jax.Array]:
    """Returns the range of queries that see any key of each tile, (B, tiles) int32."""
    start = jnp.arange(tiles, dtype=jnp.int32) * keys
    some = (seen.first[..., None] < start + keys) & (seen.last[..., None] > start)
    index = jnp.arange(seen.first.shape[1], dtype=jnp.int32)[:, None]
    begin = jnp.min(jnp.where(some, index, seen.first.shape[1]), axis=1)
    return {"begin": begin, "end": jnp.maximum(begin, jnp.max(jnp.where(some, index + 1, 0), axis=1))}
