"""From the arrays of a call to tiles of the forward pass; a backend adds the choice of the tile."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.blockwise.forward import attend
from pallas_kernels.attention.blockwise.keys import Cache, FetchBlock, contiguous_blocks, paged_blocks
from pallas_kernels.attention.blockwise.scores import ScoreArrays
from pallas_kernels.attention.call import AttentionCall, Limits
from pallas_kernels.attention.eight_bits import scaled_queries, scaled_results
from pallas_kernels.attention.limits import poison, within
from pallas_kernels.attention.mask_bounds import mask_bounds
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.contract import AttentionContract
from pallas_kernels.parts.xla.tiles import isolate


class ProgramShape(NamedTuple):
    """What the forward program depends on besides its tile.

    Attributes:
        heads: Key heads K.
        group: Query heads per key head.
        size: Width H of a head.
        value_size: Width V of a head of the values.
        capped: Whether there is a soft cap.
    """

    heads: int
    group: int
    size: int
    value_size: int
    capped: bool = False


ChooseTile = Callable[[int, int, int, ProgramShape], Tile]
"""Maps the numbers of sequences, queries and keys and the program's shape to a tile."""


def run(call: AttentionCall, *, contract: AttentionContract, choose: ChooseTile) -> tuple[jax.Array, ...]:
    """Runs the forward pass.

    Args:
        call: The call.
        contract: Order of the sums.
        choose: Chooses the tile.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32.
    """
    call, valid = within(call)
    if call.key_scale is not None:
        (query,) = isolate(scaled_queries(call.query, call.key_scale, call.key.dtype))
        call = replace(call, query=query)
    out, lse = _tiles(call, call.numbers(), contract=contract, choose=choose)
    if call.value_scale is not None:
        (out,) = isolate(out)
        (out,) = isolate(scaled_results(out, call.value_scale, call.key.dtype))
    return poison(valid, out, lse)


def _tiles(
    call: AttentionCall, limits: Limits, *, contract: AttentionContract, choose: ChooseTile
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a call within its limits, without the factors of 8-bit values."""
    query, options = call.query, call.options
    key, value = Cache(call.key, query.dtype), None if call.value is None else Cache(call.value, query.dtype)
    arrays = ScoreArrays.of(call, limits[0])
    batch, length, query_heads, size = query.shape
    heads, value_size, capacity = call.key.shape[2], call.value_size, call.capacity
    if call.is_empty:
        return jnp.zeros((*query.shape[:3], value_size), query.dtype), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    block = contract.key_block
    shape = ProgramShape(heads, query_heads // heads, size, value_size, options.soft_cap is not None)
    tile = choose(batch, length, capacity, shape)
    query = jnp.pad(query, [(0, 0), (0, max(0, tile.queries - length)), (0, 0), (0, 0)])
    indices = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32), query.shape[:2])
    offsets, queries, keys = limits
    seen = jnp.minimum(queries, length), jnp.minimum(keys, capacity)
    what = mask_bounds(offsets, *seen, indices, causal=options.causal, window=options.window)
    out, lse = attend(
        query,
        _reader(key, call.page_table, tile, block),
        None if value is None else _reader(value, call.page_table, tile, block),
        what,
        arrays.padded(0, max(0, tile.queries - length), block),
        call.sinks,
        heads=heads,
        value_size=value_size,
        tile=tile,
        contract=contract,
        options=options,
    )
    return out[:, :length], lse[:, :length]


def _reader(cache: Cache, page_table: jax.Array | None, tile: Tile, block: int) -> FetchBlock:
    if page_table is None:
        return contiguous_blocks(cache, tile, block)
    return paged_blocks(cache, page_table, tile, block)
