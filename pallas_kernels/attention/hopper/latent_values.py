"""Values of latent attention from scores, a thread block for each split and 64 columns of the values.

Four warpgroups make weights of scores, every fourth block of keys each, and a fifth one multiplies them with the
values, of which a split's columns are all on their way from the start. The bits are those of `latent.py`.
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
    store_columns,
    store_numbers,
)
from pallas_kernels.attention.hopper._latent_items import Items
from pallas_kernels.attention.hopper._latent_sums import WIDE, add_blocks, fold_keys
from pallas_kernels.attention.hopper._merge_loop import padded_splits
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.columns import down
from pallas_kernels.attention.hopper.latent_scores import Scores
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.chunks import take_back
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARPGROUP, Arithmetic, filled, tiled

_WORKERS: Final = 4  # warpgroups that make weights


class Memory(NamedTuple):
    """Shared memory and barriers.

    Attributes:
        values: (blocks, 64, 64), columns of the latents of a split.
        weights: (blocks, 64, 16).
        decays: (blocks, 16) float32.
        sums: (blocks, 128) float32, of weights.
        wide: (workers, n) float32.
        numbers: (16,) float32.
        values_full: A barrier for each block.
        weights_full: The same.
        sums_full: A barrier.
    """

    values: Any
    weights: Any
    decays: Any
    sums: Any
    wide: Any
    numbers: Any
    values_full: Any
    weights_full: Any
    sums_full: Any

    @classmethod
    def types(cls, items: Items, dtype: Any) -> "Memory":
        """Returns the types."""
        blocks, block = items.blocks_of_split, items.contract.key_block
        return cls(
            values=plgpu.SMEM((blocks, block, ROWS), dtype, transforms=tiled(dtype, ROWS)),
            weights=plgpu.SMEM((blocks, block, NARROW), dtype, transforms=tiled(dtype, NARROW)),
            decays=plgpu.SMEM((blocks, NARROW), jnp.float32),
            sums=plgpu.SMEM((blocks, WARPGROUP), jnp.float32),
            wide=plgpu.SMEM((_WORKERS, WIDE), jnp.float32),
            numbers=plgpu.SMEM((NARROW,), jnp.float32),
            values_full=plgpu.Barrier(num_arrivals=items.source.copies, num_barriers=blocks),
            weights_full=plgpu.Barrier(num_barriers=blocks),
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
        """Makes the weights of every fourth block."""
        m, items = self.memory, self.items
        tile, columns = Arithmetic(interpret=self.interpret), Arithmetic(interpret=self.interpret, axis=0)
        blocks, block = items.blocks_of_split, items.contract.key_block
        rounds = -(-blocks // _WORKERS)
        own = [jnp.minimum(i * _WORKERS + worker, blocks - 1) for i in range(rounds)]
        scores = [
            take_back(self.where(self.found.scores).at[self.first + at], (block, NARROW), self.interpret) for at in own
        ]
        maxima = [self.largest(at) for at in range(blocks)]
        before = plgpu.layout_cast(jnp.full((NARROW,), LEAST, jnp.float32), COLUMN)
        for i in range(rounds):
            mine = maximum = before
            for j, largest in enumerate(maxima[i * _WORKERS : (i + 1) * _WORKERS]):
                before = jnp.maximum(before, largest)
                mine = jnp.where(jnp.full(mine.shape, j < worker), before, mine)
                maximum = jnp.where(jnp.full(mine.shape, j <= worker), before, maximum)
            at = i * _WORKERS + worker

            @pl.when(at < self.count)
            def _(mine: jax.Array = mine, maximum: jax.Array = maximum, i: int = i, at: Any = at) -> None:
                weights = tile.exp2(tile.fused(scores[i], items.factor, down(-maximum)))
                decay = columns.exp2(mine - maximum)
                share(weights.astype(m.weights.dtype), m.weights.at[at], self.interpret)
                store_numbers((m.decays.at[at],), (decay,), 0, self.interpret)
                if self.interpret:
                    plgpu.commit_smem()  # ordinary writes
                plgpu.barrier_arrive(m.weights_full.at[at])

                @pl.when(self.column == 0)
                def _() -> None:
                    fold_keys(weights, m.wide.at[worker], m.sums.at[at], self.interpret)

        pl.when(self.column == 0)(lambda: self.add(worker, before))

    def largest(self, block: int) -> jax.Array:
        """Returns the largest scores of a block of the split, (16,); the least number where there is none."""
        ref = self.where(self.found.maxima).at[self.first + block]
        found = plgpu.load(ref, layout=COLUMN, optimized=False)
        return jnp.where(jnp.full((NARROW,), block < self.count), found, jnp.float32(LEAST))

    def add(self, worker: Any, maximum: jax.Array) -> None:
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
            index, row = self.sequence.index, self.sequence.tile * NARROW
            refs = tuple(self.stats.at[index, i, :, self.split] for i in range(2))
            store_numbers(refs, (maximum, total), row, self.interpret)

    def multiply(self) -> None:
        """Copies and multiplies the values."""
        m, items = self.memory, self.items
        index, tile = self.sequence.index, Arithmetic(interpret=self.interpret)
        key: Any = self.refs.key
        columns = key.at[:, :, :, pl.ds(self.column, ROWS)]

        @pl.loop(0, self.count)
        def _(at: Any) -> None:
            block = self.first + at
            pages = items.source.pages(self.refs.page_table, index, block)
            items.source.copy(columns, pages, m.values.at[at], m.values_full.at[at], index, block, 0)

        wrong = self.first_wrong()

        def step(at: Any, values: jax.Array) -> jax.Array:
            plgpu.barrier_wait(m.weights_full.at[at])
            decay = plgpu.load(m.decays.at[at], layout=COLUMN, optimized=False)
            values = tile.product(values, down(decay))
            plgpu.barrier_wait(m.values_full.at[at])

            @pl.when(wrong != NOWHERE)
            def _() -> None:
                self.zero_fill(m.values.at[at])

            operands = (m.values.at[at],), (m.weights.at[at],)
            values = start(values, *operands, left_along=False, right_along=False, interpret=self.interpret)
            (values,) = finish(0, values, interpret=self.interpret)
            return values

        values = lax.fori_loop(0, self.count, step, filled((ROWS, NARROW), 0))
        found = wrong < self.sequence.ends_of_columns()
        values = jnp.where(down(found), jnp.float32(math.nan), values)
        rows = self.out.at[index, self.split]
        store_columns(rows, values, self.sequence.tile * NARROW, self.column, self.interpret)

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
    rows, slices = call.query.shape[1], items.value_size // ROWS

    def kernel(refs: AttentionCall, found: Scores, out: Any, stats: Any, memory: Memory) -> None:
        part, split, index = (lax.axis_index(name) for name in ("part", "split", "sequence"))
        tile, column = lax.div(part, slices), lax.rem(part, slices) * ROWS
        sequence = Sequence(items, Lengths(refs.limits), index, tile)
        length = items.blocks_of_split
        count = jnp.minimum(sequence.blocks().last - split * length, length)
        body = Body(items, sequence, split, column, count, refs, found, out, stats, memory)
        worker = lax.axis_index("warpgroup")

        @pl.when(sequence.some & (count > 0))
        def _() -> None:
            pl.when(worker < _WORKERS)(lambda: body.weigh(worker))
            pl.when(worker == _WORKERS)(body.multiply)

    values, stats = launch(
        "latent_values",
        kernel,
        [
            jax.ShapeDtypeStruct((items.batch, items.splits, rows, items.value_size), jnp.float32),
            jax.ShapeDtypeStruct((items.batch, 2, rows, padded_splits(items.splits)), jnp.float32),
        ],
        {"part": slices * (rows // NARROW), "split": items.splits, "sequence": items.batch},
        [Memory.types(items, call.query.dtype)],
        warpgroups={"warpgroup": _WORKERS + 1},
        parameters=plgpu.CompilerParams(
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=items.interpret,
    )(call, found)
    return values, stats
