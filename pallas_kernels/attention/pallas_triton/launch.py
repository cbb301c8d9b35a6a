"""From the arrays of a forward pass to its kernel."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.eight_bits import scaled_queries
from pallas_kernels.attention.limits import poison, within
from pallas_kernels.attention.pallas_triton._arrays import (
    arrays_of,
    check,
    launch_of,
    quantised,
    refs_of,
    what_is_seen,
    widest,
)
from pallas_kernels.attention.pallas_triton.forward import forward_kernel
from pallas_kernels.attention.schedule.pallas_triton import AttentionTile, attention_tile
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.launch import launch


@in_32_bits
def attention(
    call: AttentionCall, *, contract: MmaAttentionContract, tile: AttentionTile | None = None, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        call: The call.
        contract: Order of all sums.
        tile: Rows, warps and stages; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query with the keys that it sees.

    Example:
        >>> from pallas_kernels.contract import mma_attention_contract
        >>> from pallas_kernels.attention.call import AttentionOptions
        >>> q, k, limits = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 3, 1, 16)), jnp.array([[0, 1, 3]])
        >>> call = AttentionCall(q, k, k, limits, AttentionOptions(scale=1.0))
        >>> attention(call, contract=mma_attention_contract("float32", 16), interpret=True)[0][0, 0, :, 0].tolist()
        [1.0, 1.0]
    """
    check(call, contract)
    call, valid = within(call)
    limits, query, value_size = call.numbers(), call.query, call.value_size
    if call.is_empty:
        rows = query.shape[:3]
        return poison(valid, jnp.zeros((*rows, value_size), query.dtype), jnp.full(rows, -jnp.inf, jnp.float32))
    seen = what_is_seen(call, limits)
    if call.key_scale is not None:
        call = replace(call, query=scaled_queries(query, call.key_scale, call.key.dtype))
    given = arrays_of(call, seen, limits[0])
    given |= quantised(given, call.value_scale, value_size)
    if call.sinks is not None:
        given["sinks"] = call.sinks
    if call.page_table is not None:
        given["page_table"] = jnp.clip(call.page_table, 0, call.key.shape[0] - 1)
    own = launch_of(call, given, contract.key_block, contract.row_block, interpret=interpret)
    tile = attention_tile(widest(call), query.dtype.itemsize) if tile is None else tile
    tiles = -(-own.rows // tile.rows)

    def kernel(*refs: Any) -> None:
        *read, out, lse = refs
        forward_kernel(refs_of(own, given, read), out, lse, launch=own, count=tile.rows, tiles=tiles)

    out, lse = launch(
        kernel,
        *given.values(),
        blocks=query.shape[0] * own.heads * tiles,
        out=[
            jax.ShapeDtypeStruct((*query.shape[:3], own.value_size), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ],
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return poison(valid, out[..., :value_size], lse)
