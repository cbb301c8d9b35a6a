"""Where decode puts what a tile of rows gives."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.attention.hopper.columns import COLUMN
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.registers import element, number_of
from pallas_kernels.parts.hopper.tile import ROW, ROWS, TILE, i32, thread_of_warpgroup


class Place(NamedTuple):
    """Where the rows of a tile lie in arrays of all rows.

    Attributes:
        sequence: Index among the sequences of the arrays.
        row: First row among those of the sequence.
        left: Rows from there on that may be written; a tile has at most 64 of them.
    """

    sequence: Any
    row: Any
    left: Any


class Results(NamedTuple):
    """Where results go: values and numbers of rows, of each sequence and, unless items are whole, of each split."""

    values: Any
    numbers: Any

    def of(self, place: Place, split: Any, whole: bool) -> "Results":
        """Returns the rows of a sequence: (R, V), and (R,) for each number."""
        if whole:
            return Results(self.values.at[place.sequence], (self.numbers.at[place.sequence],))
        numbers = tuple(self.numbers.at[place.sequence, i, :, split] for i in range(2))
        return Results(self.values.at[place.sequence, split], numbers)


def store_rows(
    values_ref: Any,
    numbers_refs: tuple[Any, ...],
    place: Place,
    values: jax.Array,
    numbers: tuple[jax.Array, ...],
    counts: set[int],
    interpret: bool,
) -> None:
    """Writes the rows of a tile to their place in GPU memory (R, V) and (R,); `counts` says how many there may be."""
    _, first, left = place
    if interpret:
        for count in counts:

            @pl.when(jnp.minimum(left, ROWS) == count)
            def _(count: int = count) -> None:
                values_ref.at[pl.ds(first, count)][...] = values[:count]
                for ref, found in zip(numbers_refs, numbers, strict=True):
                    ref.at[pl.ds(first, count)][...] = found[:count]

        return
    number, count = plgpu.Layout.WG_SPLAT(()), len(numbers)
    types = (*[plgpu.RefType()] * (1 + count), number, number, TILE, *[ROW] * count)

    @inline(*types)
    def store(values_ref: Any, *given: Any) -> None:
        refs, (first, left, values, *stats) = given[:count], given[count:]
        index = ir.IndexType.get()
        thread = thread_of_warpgroup()
        quad = arith.remui(thread, i32(4))
        upper = arith.addi(
            arith.muli(arith.divui(thread, i32(32)), i32(16)), arith.divui(arith.remui(thread, i32(32)), i32(4))
        )
        pairs = values.registers.reshape(values.registers.shape[1], 2)
        for half in range(2):
            row = arith.addi(upper, i32(8 * half))
            target = arith.index_cast(index, arith.addi(row, first.registers.item()))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, left.registers.item())):
                for j in range(pairs.shape[0]):
                    column = arith.addi(arith.muli(quad, i32(2)), i32(8 * j))
                    vector.store(pairs[j, half], values_ref, [target, arith.index_cast(index, column)])
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, quad, i32(0))):
                    for ref, found in zip(refs, stats, strict=True):
                        memref.store(number_of(found.registers.flat[half]), ref, [target])

    store(values_ref, *numbers_refs, *(jnp.asarray(x, jnp.int32) for x in (first, left)), values, *numbers)


def store_columns(
    values_ref: Any,
    numbers_refs: tuple[Any, ...],
    place: Place,
    values: tuple[jax.Array, ...],
    numbers: tuple[jax.Array, ...],
    most: int,
    interpret: bool,
    of_bytes: bool = False,
) -> None:
    """Writes the columns of tiles (64, 8) as `store_rows` does rows; in the interpreter `most` of them.

    With `of_bytes` the rows of tiles lie as `bytes_left.start_values` leaves them.
    """
    _, first, left = place
    if interpret:
        rows = pl.ds(first, most)
        values_ref.at[rows][...] = jnp.concatenate(values).T[:most]
        for ref, found in zip(numbers_refs, numbers, strict=True):
            ref.at[rows][...] = found[:most]
        return
    number, count = plgpu.Layout.WG_SPLAT(()), len(numbers)
    types = (*[plgpu.RefType()] * (1 + count), number, number, *[TILE] * len(values), *[COLUMN] * count)

    @inline(*types)
    def store(values_ref: Any, *given: Any) -> None:
        refs, (first, left, *arrays) = given[:count], given[count:]
        tiles, stats = arrays[: len(values)], arrays[len(values) :]
        index = ir.IndexType.get()
        thread = thread_of_warpgroup()
        lane = arith.remui(thread, i32(32))
        warp, own = arith.muli(arith.divui(thread, i32(32)), i32(16)), arith.divui(lane, i32(4))
        upper, apart = arith.addi(warp, arith.muli(own, i32(2)) if of_bytes else own), 1 if of_bytes else 8
        for i in range(2):
            row = arith.addi(arith.muli(arith.remui(lane, i32(4)), i32(2)), i32(i))
            target = arith.index_cast(index, arith.addi(row, first.registers.item()))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, left.registers.item())):
                for j, tile in enumerate(tiles):
                    for half, pair in enumerate(tile.registers.flat):
                        column = arith.index_cast(index, arith.addi(upper, i32(ROWS * j + apart * half)))
                        memref.store(element(pair, i), values_ref, [target, column])
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, upper, i32(0))):
                    for ref, found in zip(refs, stats, strict=True):
                        memref.store(number_of(found.registers.flat[0], i), ref, [target])

    store(values_ref, *numbers_refs, *(jnp.asarray(x, jnp.int32) for x in (first, left)), *values, *numbers)
