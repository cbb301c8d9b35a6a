"""Tiles of spread latent attention, whose rows are keys or columns of values and whose columns are rows of queries."""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.attention.hopper._latent_items import Items
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.registers import element, number_of
from pallas_kernels.parts.hopper.tile import ROWS, TILE, i32, thread_of_warpgroup

COLUMN: Final = TILE.reduce(0)
"""Layout of a number for each column of a tile."""

NARROW: Final = 16
"""Rows of queries of a tile: they are wgmma's columns."""

NOWHERE: Final = 2**31 - 1
"""The place of a key that is not finite where there is none."""


@dataclass(frozen=True)
class Sequence:
    """A tile of rows of a sequence, with what it sees.

    Attributes:
        items: The static parameters.
        lengths: Limits of all sequences.
        index: Index of the sequence.
        tile: Index of the tile of `NARROW` rows.
    """

    items: Items
    lengths: Lengths
    index: Any
    tile: Any

    @property
    def keys(self) -> Any:
        """Keys of the sequence, no more than there is room for."""
        return self.items.keys_of(self.lengths, self.index)

    @property
    def some(self) -> Any:
        """Whether the sequence has queries."""
        return self.lengths.queries[self.index] > 0

    def blocks(self) -> Blocks:
        """Returns the blocks that any query of the sequence sees."""
        offset = self.lengths.offsets[self.index]
        return self.items.mask_bounds.blocks(
            offset, offset + (self.items.queries - 1), self.keys, self.items.contract.key_block
        )

    def ends(self, rows: jax.Array) -> jax.Array:
        """Returns the end of the keys that rows of the tile see.

        Args:
            rows: int32, numbers of rows in the tile.
        """
        rows = rows + self.tile * NARROW
        query = lax.div(rows, jnp.full_like(rows, self.items.heads))
        positions = query + self.lengths.offsets[self.index]
        return self.items.mask_bounds.range(positions, self.keys)[1]

    def ends_of_columns(self) -> jax.Array:
        """Returns the end of the keys that each column sees, (16,) int32."""
        return self.ends(plgpu.broadcasted_iota(jnp.int32, (NARROW,), 0, layout=COLUMN))


def store_columns(ref: Any, tile: jax.Array, row: Any, column: Any, interpret: bool) -> None:
    """Writes a tile (64, n) float32 turned to GPU memory (R, V), from a row and a column on."""
    count = tile.shape[1]
    if interpret:
        ref.at[pl.ds(row, count), pl.ds(column, ROWS)][...] = tile.T
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(), TILE, number, number)
    def store(ref: Any, tile: Any, row: Any, column: Any) -> None:
        index, thread = ir.IndexType.get(), thread_of_warpgroup()
        lane = arith.remui(thread, i32(32))
        upper = arith.addi(arith.muli(arith.divui(thread, i32(32)), i32(16)), arith.divui(lane, i32(4)))
        upper = arith.addi(upper, column.registers.item())
        first = arith.addi(arith.muli(arith.remui(lane, i32(4)), i32(2)), row.registers.item())
        pairs = tile.registers.reshape(count // 8, 2)
        for j in range(count // 8):
            for i in range(2):
                to = arith.index_cast(index, arith.addi(first, i32(8 * j + i)))
                for half in range(2):
                    at = arith.index_cast(index, arith.addi(upper, i32(8 * half)))
                    memref.store(element(pairs[j, half], i), ref, [to, at])

    store(ref, tile, *(jnp.asarray(x, jnp.int32) for x in (row, column)))


def store_numbers(refs: tuple[Any, ...], numbers: tuple[jax.Array, ...], row: Any, interpret: bool) -> None:
    """Writes numbers of columns (16,) to GPU memory (R,) from a row on."""
    if interpret:
        for ref, x in zip(refs, numbers, strict=True):
            ref.at[pl.ds(row, x.shape[0])][...] = x
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(*[plgpu.RefType()] * len(refs), *[COLUMN] * len(refs), number)
    def store(*given: Any) -> None:
        refs, numbers, row = given[: len(given) // 2], given[len(given) // 2 : -1], given[-1]
        index, thread = ir.IndexType.get(), thread_of_warpgroup()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(4))):
            first = arith.addi(arith.muli(thread, i32(2)), row.registers.item())
            for ref, x in zip(refs, numbers, strict=True):
                for j, pair in enumerate(x.registers.flat):
                    for i in range(2):
                        place = arith.index_cast(index, arith.addi(first, i32(8 * j + i)))
                        memref.store(number_of(pair, i), ref, [place])

    store(*refs, *numbers, jnp.asarray(row, jnp.int32))


def largest_so_far(maxima: Any, first: Any, count: Any, target: Any, interpret: bool) -> None:
    """Writes the largest number of each row before and after each block, so that `target[i]` is that of i blocks.

    A block is skipped where there are fewer. The caller's threads meet at a barrier before they read.

    Args:
        maxima: (blocks of all splits, 16) float32 in GPU memory.
        first: The first block.
        count: Number of blocks.
        target: Shared memory (blocks + 1, 16) float32.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    blocks = target.shape[0] - 1
    if interpret:
        found = [maxima.at[first + i][...] for i in range(blocks)]
        largest = [jnp.full((NARROW,), LEAST, jnp.float32)]
        for i, x in enumerate(found):
            largest.append(jnp.where(i < count, jnp.maximum(largest[-1], x), largest[-1]))
        target[...] = jnp.stack(largest)
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(), plgpu.RefType(), number, number)
    def find(maxima: Any, target: Any, first: Any, count: Any) -> None:
        index, thread = ir.IndexType.get(), thread_of_warpgroup()
        (first,), (count,) = first.registers.flat, count.registers.flat
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(NARROW))):
            column = arith.index_cast(index, thread)
            places = (arith.index_cast(index, arith.addi(first, i32(i))) for i in range(blocks))
            found = [memref.load(maxima, [place, column]) for place in places]
            largest = mgpu.c(float(LEAST), ir.F32Type.get())
            memref.store(largest, target, [mgpu.c(0, index), column])
            for i, x in enumerate(found):
                there = arith.cmpi(arith.CmpIPredicate.slt, i32(i), count)
                largest = arith.select(there, arith.maximumf(largest, x), largest)
                memref.store(largest, target, [mgpu.c(i + 1, index), column])

    find(maxima, target, *(jnp.asarray(x, jnp.int32) for x in (first, count)))
