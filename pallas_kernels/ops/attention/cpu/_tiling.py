"""From the arrays of a call to tiles of the forward pass; a backend adds the choice of the tile."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.cpu._forward import attend
from pallas_kernels.ops.attention.cpu._keys import Cache, FetchBlock, contiguous_blocks, paged_blocks
from pallas_kernels.ops.attention.cpu._score_arrays import ScoreArrays
from pallas_kernels.ops.attention.cpu._spec import AttentionSpec
from pallas_kernels.ops.attention.sight import sight
from pallas_kernels.schedule.cpu.attention import Tile


class ProgramShape(NamedTuple):
    """What the forward program depends on besides its tile.

    Attributes:
        heads: Key heads K.
        group: Query heads to a key head.
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


def run(
    query: jax.Array,
    key: Cache,
    value: Cache,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array | None,
    arrays: ScoreArrays,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    choose: ChooseTile,
) -> tuple[jax.Array, jax.Array]:
    """Runs the forward pass; `pallas_kernels.ops.attention.cpu.launch.attention` describes arguments and results."""
    batch, length, query_heads, size = query.shape
    heads, value_size = key.stored.shape[2], value.stored.shape[3]
    capacity = key.stored.shape[1] * (1 if page_table is None else page_table.shape[1])
    if 0 in query.shape or 0 in key.stored.shape or not value_size or not capacity:
        return jnp.zeros((*query.shape[:3], value_size), query.dtype), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    block = spec.contract.key_block
    shape = ProgramShape(heads, query_heads // heads, size, value_size, spec.soft_cap is not None)
    tile = choose(batch, length, capacity, shape)
    query = jnp.pad(query, [(0, 0), (0, max(0, tile.queries - length)), (0, 0), (0, 0)])
    indices = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32), query.shape[:2])
    query_lengths = jnp.minimum(query_lengths, length)
    key_lengths = jnp.minimum(key_lengths, capacity)
    what = sight(offsets, query_lengths, key_lengths, indices, causal=spec.causal, window=spec.window)
    out, lse = attend(
        query,
        _reader(key, page_table, tile, block),
        _reader(value, page_table, tile, block),
        what,
        arrays.padded(0, max(0, tile.queries - length), block),
        sinks,
        heads=heads,
        value_size=value_size,
        tile=tile,
        spec=spec,
    )
    return out[:, :length], lse[:, :length]


def _reader(cache: Cache, page_table: jax.Array | None, tile: Tile, block: int) -> FetchBlock:
    if page_table is None:
        return contiguous_blocks(cache, tile, block)
    return paged_blocks(cache, page_table, tile, block)
