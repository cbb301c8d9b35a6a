"""Values of latent attention from scores, a thread block for each split and some columns of the values.

Two warpgroups make weights of scores, every second block of keys each; every other one multiplies them with 64 columns
of the values. The bits are those of `latent.py`.
"""

import math
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._latent_columns import (
    COLUMN,
    NARROW,
    NOWHERE,
    Sequence,
    largest_so_far,
    store_columns,
    store_numbers,
)
from pallas_kernels.attention.hopper._latent_items import Items
from pallas_kernels.attention.hopper._latent_sums import WIDE, add_blocks, fold_keys
from pallas_kernels.attention.hopper._merge_loop import padded_splits
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.columns import down
from pallas_kernels.attention.hopper.latent_scores import Scores
from pallas_kernels.parts.hopper.chunks import take_back
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARPGROUP, Arithmetic, filled, tiled

_WORKERS: Final = 2  # warpgroups that make weights
_STAGES: Final = 6  # of 64 columns of values: two thread blocks of so many share a multiprocessor
_AHEAD: Final = 3  # scores that a warpgroup has asked for before it needs them


class Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
        values: (parts, stages, 64, 64), columns of latents.
        weights: (blocks, 64, 16).
        largest: (blocks + 1, 16) float32, the largest scores before and after each block.
        decays: (blocks, 16) float32.
        sums: (blocks, 128) float32, of weights.
        wide: (workers, n) float32.
        numbers: (16,) float32.
        values_full: A barrier for each stage of each part.
        weights_full: A barrier for each block.
        largest_full: A barrier.
        sums_full: A barrier.
    """

    values: Any
    weights: Any
    largest: Any
    decays: Any
    sums: Any
    wide: Any
    numbers: Any
    values_full: Any
    weights_full: Any
    largest_full: Any
    sums_full: Any

    @classmethod
    def types(cls, items: Items, dtype: Any) -> "Memory":
        """Returns the types."""
        blocks, block, parts = items.blocks_of_split, items.contract.key_block, items.schedule.spread // ROWS
        stages = min(_STAGES, blocks)
        return cls(
            values=plgpu.SMEM((parts, stages, block, ROWS), dtype, transforms=tiled(dtype, ROWS)),
            weights=plgpu.SMEM((blocks, block, NARROW), dtype, transforms=tiled(dtype, NARROW)),
            largest=plgpu.SMEM((blocks + 1, NARROW), jnp.float32),
            decays=plgpu.SMEM((blocks, NARROW), jnp.float32),
            sums=plgpu.SMEM((blocks, WARPGROUP), jnp.float32),
            wide=plgpu.SMEM((_WORKERS, WIDE), jnp.float32),
            numbers=plgpu.SMEM((NARROW,), jnp.float32),
            values_full=plgpu.Barrier(num_arrivals=items.source.copies, num_barriers=parts * stages),
            weights_full=plgpu.Barrier(num_barriers=blocks),
            largest_full=plgpu.Barrier(),
            sums_full=plgpu.Barrier(num_arrivals=_WORKERS),
        )


class Body(NamedTuple):
    """The kernel's program for a split of a tile and 64 columns.

    Attributes:
        items: The static parameters.
        sequence: The tile.
        split: Index of the split.
        column: First column of the values.
        count: Blocks of keys of the split.
        refs: The arrays of the call.
        found: The scores.
        out: (B, splits, R, V) float32.
        stats: (B, 2, R, splits) float32.
        memory: Shared memory and barriers.
    """

    items: Items
    sequence: Sequence
    split: Any
    column: Any
    count: Any
    refs: AttentionCall
    found: Scores
    out: Any
    stats: Any
    memory: Memory

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in Mosaic's interpreter."""
        return bool(self.items.interpret)

    @property
    def first(self) -> Any:
        """The first block of keys."""
        return self.split * self.items.blocks_of_split

    def where(self, ref: Any) -> Any:
        """Returns what an array has of the tile."""
        return ref.at[self.sequence.index, self.sequence.tile]

    def first_wrong(self) -> Any:
        """Returns the first key of the split whose values are not finite."""
        places = self.where(self.found.wrong)
        nearest = jnp.int32(NOWHERE)
        for at in range(self.items.blocks_of_split):
            nearest = jnp.minimum(nearest, jnp.where(at < self.count, places[self.first + at], NOWHERE))
        return nearest

    def weigh(self, worker: Any) -> None:
        """Makes the weights of every second block."""
        m, items = self.memory, self.items
        tile, columns = Arithmetic(interpret=self.interpret), Arithmetic(interpret=self.interpret, axis=0)
        blocks = items.blocks_of_split
        rounds = -(-blocks // _WORKERS)
        scores = [self.scores(jnp.minimum(i * _WORKERS + worker, blocks - 1)) for i in range(min(_AHEAD, rounds))]

        @pl.when(worker == 0)
        def _() -> None:
            largest_so_far(self.where(self.found.maxima), self.first, self.count, m.largest, self.interpret)
            if self.interpret:
                plgpu.commit_smem()  # ordinary writes
            for _ in range(_WORKERS - 1):
                plgpu.barrier_arrive(m.largest_full)

        plgpu.barrier_wait(m.largest_full)
        for i in range(rounds):
            at = i * _WORKERS + worker

            @pl.when(at < self.count)
            def _(i: int = i, at: Any = at) -> None:
                before, maximum = (plgpu.load(m.largest.at[at + j], layout=COLUMN, optimized=False) for j in range(2))
                weights = tile.exp2(tile.fused(scores[i], items.factor, down(-maximum)))
                decay = columns.exp2(before - maximum)
                share(weights.astype(m.weights.dtype), m.weights.at[at], self.interpret)
                store_numbers((m.decays.at[at],), (decay,), 0, self.interpret)
                if self.interpret:
                    plgpu.commit_smem()
                plgpu.barrier_arrive(m.weights_full.at[at])

                @pl.when(self.column == 0)
                def _() -> None:
                    fold_keys(weights, m.wide.at[worker], m.sums.at[at], self.interpret)

            if i + _AHEAD < rounds:
                scores.append(self.scores(jnp.minimum((i + _AHEAD) * _WORKERS + worker, blocks - 1)))

        pl.when(self.column == 0)(lambda: self.add(worker))

    def scores(self, block: Any) -> jax.Array:
        """Returns the scores of a block of the split, (64, 16)."""
        shape = self.items.contract.key_block, NARROW
        return take_back(self.where(self.found.scores).at[self.first + block], shape, self.interpret)

    def add(self, worker: Any) -> None:
        """Adds the weights of the split."""
        m = self.memory
        if self.interpret:
            plgpu.commit_smem()
        plgpu.barrier_arrive(m.sums_full)

        @pl.when(worker == 0)
        def _() -> None:
            plgpu.barrier_wait(m.sums_full)
            total = add_blocks(m.sums, m.decays, m.numbers, self.count, self.interpret)
            total = jnp.where(self.first_wrong() < self.sequence.ends_of_columns(), jnp.float32(math.nan), total)
            maximum = plgpu.load(m.largest.at[self.count], layout=COLUMN, optimized=False)
            index, row = self.sequence.index, self.sequence.tile * NARROW
            refs = tuple(self.stats.at[index, i, :, self.split] for i in range(2))
            store_numbers(refs, (maximum, total), row, self.interpret)

    def multiply(self, part: Any) -> None:
        """Copies and multiplies 64 columns of the values."""
        m, items, column = self.memory, self.items, self.column + part * ROWS
        index, tile = self.sequence.index, Arithmetic(interpret=self.interpret)
        key: Any = self.refs.key
        columns = key.at[:, :, :, pl.ds(column, ROWS)]

        stages = m.values.shape[1]
        first = part * stages

        def copy(at: Any) -> None:
            block, slot = self.first + at, lax.rem(at, stages)
            pages = items.source.pages(self.refs.page_table, index, block)
            items.source.copy(columns, pages, m.values.at[part, slot], m.values_full.at[first + slot], index, block, 0)

        pl.loop(0, jnp.minimum(self.count, stages))(copy)
        wrong = self.first_wrong()

        def step(at: Any, values: jax.Array) -> jax.Array:
            plgpu.barrier_wait(m.weights_full.at[at])
            decay = plgpu.load(m.decays.at[at], layout=COLUMN, optimized=False)
            values = tile.product(values, down(decay))
            slot = lax.rem(at, stages)
            plgpu.barrier_wait(m.values_full.at[first + slot])

            @pl.when(wrong != NOWHERE)
            def _() -> None:
                self.zero_fill(m.values.at[part, slot])

            operands = (m.values.at[part, slot],), (m.weights.at[at],)
            values = start(values, *operands, left_along=False, right_along=False, interpret=self.interpret)
            (values,) = finish(0, values, interpret=self.interpret)

            @pl.when(at + stages < self.count)
            def _() -> None:
                plgpu.commit_smem()  # every warp has read
                copy(at + stages)

            return values

        values = lax.fori_loop(0, self.count, step, filled((ROWS, NARROW), 0))
        found = wrong < self.sequence.ends_of_columns()
        values = jnp.where(down(found), jnp.float32(math.nan), values)
        rows = self.out.at[index, self.split]
        store_columns(rows, values, self.sequence.tile * NARROW, column, self.interpret)

    def zero_fill(self, ref: Any) -> None:
        """Zero-fills values that are not finite: no query that gives a result sees them."""
        values = plgpu.load(ref, layout=TILE, optimized=False)
        ref[...] = jnp.where(values.astype(jnp.float32) * 0.0 == 0.0, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def values_of_splits(call: AttentionCall, found: Scores, items: Items) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of values of each split, and its maxima and sums of weights.

    Args:
        call: The call, as in `scores_of_blocks`.
        found: The scores.
        items: The static parameters.

    Returns:
        (B, splits, R, V), and (B, 2, R, splits'), float32.
    """
    rows = call.query.shape[1]

    def kernel(refs: AttentionCall, found: Scores, out: Any, stats: Any, memory: Memory) -> None:
        column, tile, item = (lax.axis_index(name) for name in ("column", "tile", "item"))
        column, split, index = column * items.schedule.spread, lax.rem(item, items.splits), lax.div(item, items.splits)
        sequence = Sequence(items, Lengths(refs.limits), index, tile)
        length = items.blocks_of_split
        count = jnp.minimum(sequence.blocks().last - split * length, length)
        body = Body(items, sequence, split, column, count, refs, found, out=out, stats=stats, memory=memory)
        worker = lax.axis_index("warpgroup")

        @pl.when(sequence.some & (count > 0))
        def _() -> None:
            pl.when(worker < _WORKERS)(lambda: body.weigh(worker))
            pl.when(worker >= _WORKERS)(lambda: body.multiply(worker - _WORKERS))

    values, stats = launch(
        "latent_values",
        kernel,
        [
            jax.ShapeDtypeStruct((items.batch, items.splits, rows, items.value_size), jnp.float32),
            jax.ShapeDtypeStruct((items.batch, 2, rows, padded_splits(items.splits)), jnp.float32),
        ],
        # A tile is an axis of its own: LLVM drops the mask of a quotient times 16 that is divided again.
        {
            "column": items.value_size // items.schedule.spread,
            "tile": rows // NARROW,
            "item": items.splits * items.batch,
        },
        [Memory.types(items, call.query.dtype)],
        warpgroups={"warpgroup": _WORKERS + items.schedule.spread // ROWS},
        parameters=plgpu.CompilerParams(
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=items.interpret,
    )(call, found)
    return values, stats
