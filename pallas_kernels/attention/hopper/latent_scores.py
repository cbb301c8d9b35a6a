"""Scores of latent attention, a thread block for each block of 64 keys: no chain of sums is longer than a score's.

Keys are wgmma's rows and 16 rows of queries its columns. The bits are those of `latent.py`.
"""

import math
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._latent_columns import COLUMN, NARROW, NOWHERE, Sequence, store_numbers
from pallas_kernels.attention.hopper._latent_items import Items
from pallas_kernels.attention.hopper._not_finite import first_not_finite, mark_not_finite
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.parts.hopper.chunks import put_away
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, tiled

_PIECE: Final = 192  # columns that are copied together


class Scores(NamedTuple):
    """What is known of blocks of keys.

    Attributes:
        scores: (B, tiles, blocks, 64 * 16) float32, as `chunks.put_away` stores them; -inf where a key is not seen.
        maxima: (B, tiles, blocks, 16) float32, the largest score of each row, in units of ln(2).
        wrong: (B, tiles, blocks) int32, the first key whose values are not finite.
    """

    scores: Any
    maxima: Any
    wrong: Any


class Memory(NamedTuple):
    """Shared memory and barriers."""

    queries: Any
    keys: Any
    marks: Any
    queries_full: Any
    keys_full: Any

    @classmethod
    def types(cls, items: Items, dtype: Any) -> "Memory":
        """Returns the types."""
        pieces, block = items.size // _PIECE, items.contract.key_block
        return cls(
            queries=plgpu.SMEM((NARROW, items.size), dtype, transforms=tiled(dtype, items.size)),
            keys=plgpu.SMEM((pieces, block, _PIECE), dtype, transforms=tiled(dtype, _PIECE)),
            marks=plgpu.SMEM((1,), jnp.int32),
            queries_full=plgpu.Barrier(),
            keys_full=plgpu.Barrier(num_arrivals=items.source.copies, num_barriers=pieces),
        )


def scores_of_blocks(call: AttentionCall, items: Items) -> Scores:
    """Returns the scores of all blocks of keys.

    Args:
        call: The call, with queries as rows (B, R, size), R a multiple of 16, and S of a contiguous cache of 8.
        items: The static parameters.
    """
    tiles, blocks = call.query.shape[1] // NARROW, items.splits * items.blocks_of_split
    shape, interpret = (items.batch, tiles, blocks), bool(items.interpret)
    columns = Arithmetic(interpret=interpret, axis=0)

    def kernel(refs: AttentionCall, scores_ref: Any, maxima_ref: Any, wrong_ref: Any, m: Memory) -> None:
        index, tile, block = (lax.axis_index(name) for name in ("sequence", "tile", "block"))
        sequence = Sequence(items, Lengths(refs.limits), index, tile)
        seen, place = sequence.blocks(), block * items.contract.key_block
        key: Any = refs.key
        query: Any = refs.query

        @pl.when(sequence.some & (block < seen.last))
        def _() -> None:
            plgpu.copy_gmem_to_smem(query.at[index, pl.ds(tile * NARROW, NARROW)], m.queries, m.queries_full)
            pages = items.source.pages(refs.page_table, index, block)
            for i in range(items.size // _PIECE):
                piece = key.at[:, :, :, pl.ds(i * _PIECE, _PIECE)]
                items.source.copy(piece, pages, m.keys.at[i], m.keys_full.at[i], index, block, 0)
            m.marks[0] = jnp.int32(0)
            plgpu.commit_smem()
            plgpu.barrier_wait(m.queries_full)
            found: Any = None
            for i in range(items.size // _PIECE):
                plgpu.barrier_wait(m.keys_full.at[i])
                right = m.queries.at[:, pl.ds(i * _PIECE, _PIECE)]
                found = start(found, (m.keys.at[i],), (right,), interpret=interpret)
            (found,) = finish(0, found, interpret=interpret)
            mark_not_finite(found, ROWS, m.marks, jnp.int32(1), interpret)

            def masked(found: jax.Array) -> jax.Array:
                at = place + plgpu.broadcasted_iota(jnp.int32, (ROWS, NARROW), 0, layout=TILE)
                end = sequence.ends(plgpu.broadcasted_iota(jnp.int32, (ROWS, NARROW), 1, layout=TILE))
                return jnp.where(at < end, found, -math.inf)

            found = lax.cond(seen.in_part(block), masked, lambda found: found, found)
            put_away(found, scores_ref.at[index, tile, block], interpret)
            largest = columns.scaled(plgpu.layout_cast(found.max(axis=0), COLUMN), items.factor)
            store_numbers((maxima_ref.at[index, tile, block],), (largest,), 0, interpret)
            plgpu.commit_smem()  # marks
            wrong_ref[index, tile, block] = jnp.int32(NOWHERE)

            @pl.when(m.marks[0] != 0)
            def _() -> None:
                # Keys after the last one of the sequence too: they have weights of zero, which do not mask them.
                end = jnp.minimum(place + items.contract.key_block, items.capacity)
                wrong_ref[index, tile, block] = first_not_finite(
                    key, refs.page_table, items.value_size, index, place, end, interpret
                )

    return Scores(
        *launch(
            "latent_scores",
            kernel,
            [
                jax.ShapeDtypeStruct((*shape, ROWS * NARROW), jnp.float32),
                jax.ShapeDtypeStruct((*shape, NARROW), jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.int32),
            ],
            {"sequence": items.batch, "tile": tiles, "block": -(-items.capacity // items.contract.key_block)},
            [Memory.types(items, call.query.dtype)],
            parameters=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            interpret=items.interpret,
        )(call)
    )
