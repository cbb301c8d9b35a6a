"""From the arrays of a forward pass to its kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.ops.attention.triton._arrays import (
    arrays_of,
    call_of,
    check,
    quantised,
    refs_of,
    what_is_seen,
)
from pallas_kernels.ops.attention.triton.forward import forward_kernel
from pallas_kernels.parts.eight_bits import scaled_queries
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.triton.launch import launch
from pallas_kernels.schedule.triton.attention import AttentionTile, attention_tile


@in_32_bits
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    *,
    contract: MmaAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) of the same dtype, or int8 or float8_e4m3fn, K a divisor of N; or (P, page, K, H) with a page
            table.
        value: (B, S, K, V) or (P, page, K, V) of the dtype of `key`.
        offsets: (B,) int32, absolute position of the first query of each sequence.
        query_lengths: (B,) int32; later queries see nothing.
        key_lengths: (B,) int32; what the cache holds beyond is never seen.
        page_table: (B, n) int32, the pages of each sequence in order.
        bias: (B or 1, N or 1, T or 1, S or 1), added to the scaled scores.
        mask: bool of such a shape; false where a query does not see a key.
        sinks: (B or 1, N), a score for each head that joins the sum of the exponentials and belongs to no key.
        slopes: (B or 1, N), times the key's position minus the query's, added to the scaled scores.
        key_scale: (B or 1, K, H or 1), the factors of keys of 8 bits; see `EightBitContract`.
        value_scale: The same for the values.
        contract: Order of all sums.
        scale: Factor of the scores.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most.
        soft_cap: Scores are bent to stay below this magnitude.
        tile: Rows, warps and stages; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 512.

    Guarantee: row-invariant; a row is a query with the keys that it sees.

    Example:
        >>> from pallas_kernels.contract import mma_attention_contract
        >>> q, k, n = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 3, 1, 16)), jnp.ones(1, jnp.int32)
        >>> contract = mma_attention_contract("float32", 16)
        >>> attention(q, k, k, 0 * n, n, 3 * n, contract=contract, scale=1.0, interpret=True)[0][0, 0, :, 0].tolist()
        [1.0, 1.0]
    """
    length, size, value_size = query.shape[1], query.shape[3], value.shape[3]
    check(contract, max(size, value_size))
    capacity = key.shape[1] * (1 if page_table is None else page_table.shape[1])
    if 0 in query.shape or 0 in key.shape or not value_size or not capacity:
        return jnp.zeros((*query.shape[:3], value_size), query.dtype), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    seen = what_is_seen(length, capacity, offsets, query_lengths, key_lengths, causal, window)
    if key_scale is not None:
        query = scaled_queries(query, key_scale, key.dtype)
    given = arrays_of(query, key, value, seen, bias, mask, slopes, offsets)
    given |= quantised(given, value_scale)
    if sinks is not None:
        given["sinks"] = sinks
    if page_table is not None:
        given["table"] = jnp.clip(page_table, 0, key.shape[0] - 1)
    stored = None if value_scale is None else value.dtype.name
    call = call_of(given, contract.key_block, contract.row_block, scale, soft_cap, capacity, interpret, stored)
    tile = attention_tile(max(size, value_size), query.dtype.itemsize) if tile is None else tile
    tiles = -(-call.rows // tile.rows)

    def kernel(*refs: Any) -> None:
        *read, out, lse = refs
        forward_kernel(refs_of(given, read), out, lse, call=call, count=tile.rows, tiles=tiles)

    out, lse = launch(
        kernel,
        *given.values(),
        blocks=query.shape[0] * call.heads * tiles,
        out=[
            jax.ShapeDtypeStruct((*query.shape[:3], call.value_size), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ],
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return out[..., :value_size], lse
