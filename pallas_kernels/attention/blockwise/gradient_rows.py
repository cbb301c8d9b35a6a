"""Rows of the backward pass: queries of a sequence in tiles that begin at the edges of query blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.blockwise.forward import mask_bounds_of_rows, to_rows
from pallas_kernels.attention.blockwise.keys import Cache, FetchBlock, contiguous_blocks
from pallas_kernels.attention.blockwise.scores import ScoreArrays
from pallas_kernels.attention.call import AttentionCall, AttentionOptions, AttentionResults, Limits
from pallas_kernels.attention.mask_bounds import MaskBounds, mask_bounds
from pallas_kernels.attention.programs import row_products
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.contract import AttentionContract
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate


class Rows(NamedTuple):
    """The rows of a tile of queries.

    Attributes:
        query: (1, K, R, H).
        cotangent: (1, K, R, V).
        lse: (1, K, R).
        delta: (1, K, R), the sums of cotangent * result.
        seen: (1, R).
        queries: (1, t), what the queries of the tile see.
        begin: Its first query.
        group: Query heads per key head.
        given: Returns bias, mask and slopes of the rows and a block of keys.
    """

    query: jax.Array
    cotangent: jax.Array
    lse: jax.Array
    delta: jax.Array
    seen: MaskBounds
    queries: MaskBounds
    begin: jax.Array
    group: int
    given: Callable[[jax.Array], ScoreArrays]


@dataclass(frozen=True)
class Shared:
    """What the sequences of a call share.

    Attributes:
        rows: Queries, cotangents, results and log-sum-exp, (B, T, N, ...).
        limits: (B,) offsets, lengths of queries and of keys.
        arrays: Bias, mask and slopes, padded.
        read_keys: Reads a block of keys.
        read_values: Reads a block of values.
        heads: Number of key heads.
        keys: Keys of whole blocks.
        factor: Of the products of queries and keys.
        contract: Order of the sums.
        options: Scale, cap and mask.
        tile: Of a program.
    """

    rows: tuple[jax.Array, ...]
    limits: Limits
    arrays: ScoreArrays
    read_keys: FetchBlock
    read_values: FetchBlock
    heads: int
    keys: int
    factor: jax.Array
    contract: AttentionContract
    options: AttentionOptions
    tile: Tile

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        results: AttentionResults,
        limits: Limits,
        arrays: ScoreArrays,
        *,
        contract: AttentionContract,
        tile: Tile,
    ) -> "Shared":
        """Returns what the sequences of a call share, given its limits in columns and what changes its scores."""
        offsets, queries, keys = limits
        length, (capacity, heads) = call.query.shape[1], call.key.shape[1:3]
        block = contract.key_block
        read_keys, read_values = (contiguous_blocks(Cache(x, x.dtype), tile, block) for x in (call.key, call.values))
        return cls(
            rows=(call.query, results.cotangent, results.out, results.lse),
            limits=(offsets, jnp.minimum(queries, length), jnp.minimum(keys, capacity)),
            arrays=arrays.padded(contract.query_block, tile.queries, block),
            read_keys=read_keys,
            read_values=read_values,
            heads=heads,
            keys=-(-capacity // block) * block,
            factor=isolate(jnp.float32(call.options.factor))[0],
            contract=contract,
            options=call.options,
            tile=tile,
        )

    def sequence(self, s: jax.Array) -> "Sequence":
        """Returns one sequence."""
        front = self.contract.query_block
        rows = tuple(_padded_sequence(x, s, front, self.tile.queries) for x in self.rows)
        offsets, queries, keys = (lax.dynamic_slice_in_dim(x, s, 1, **FROM_ZERO) for x in self.limits)
        return Sequence(self, s, rows, (offsets, queries, keys))


@dataclass(frozen=True)
class Sequence:
    """One sequence; its queries are padded by a block in front and by a tile after.

    Attributes:
        shared: What it shares with the others.
        index: Its index.
        rows: As in `Shared`, (1, ...).
        limits: As in `Shared`, (1,).
    """

    shared: Shared
    index: jax.Array
    rows: tuple[jax.Array, ...]
    limits: Limits

    @property
    def _before(self) -> jax.Array:
        # The first tile begins at the edge of a query block, so up to a block less one rows before the first query.
        return lax.rem(self.limits[0][0], jnp.int32(self.shared.contract.query_block))

    @property
    def tiles(self) -> jax.Array:
        """Number of tiles of queries."""
        queries = self.shared.tile.queries
        return lax.div(self._before + self.limits[1][0] + jnp.int32(queries - 1), jnp.int32(queries))

    def tile_of_queries(self, i: jax.Array) -> Rows:
        """Returns the rows of a tile."""
        contract, tile, heads = self.shared.contract, self.shared.tile, self.shared.heads
        options = self.shared.options
        begin = i * tile.queries - self._before
        indices = begin + jnp.arange(tile.queries, dtype=jnp.int32)[None]
        seen = mask_bounds(*self.limits, indices, causal=options.causal, window=options.window)
        place = contract.query_block + begin
        q, ct, o, stat = (
            to_rows(lax.dynamic_slice_in_dim(x, place, tile.queries, axis=1, **FROM_ZERO).astype(jnp.float32), heads)
            for x in self.rows
        )
        q, ct, stat, delta = isolate(q, ct, stat, row_products(ct, o))
        query_heads = self.rows[0].shape[2]
        group = query_heads // heads
        rows_seen = MaskBounds(*isolate(*mask_bounds_of_rows(seen, group)))

        def given(block: jax.Array) -> ScoreArrays:
            part = self.shared.arrays.block(self.index, place, block * contract.key_block, tile)
            return part.by_rows(heads, tile, query_heads, q.shape[2])

        return Rows(
            query=q,
            cotangent=ct,
            lse=stat,
            delta=delta,
            seen=rows_seen,
            queries=seen,
            begin=begin,
            group=group,
            given=given,
        )


def _padded_sequence(x: jax.Array, s: jax.Array, front: int, back: int) -> jax.Array:
    one = lax.dynamic_slice_in_dim(x, s, 1, axis=0, **FROM_ZERO)
    return jnp.pad(one, [(0, 0), (front, back)] + [(0, 0)] * (x.ndim - 2))
