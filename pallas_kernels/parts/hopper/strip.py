"""How the threads of a warpgroup read and write strips of a row, on a Hopper GPU and under Mosaic's interpreter.

A strip is 128 times `vector` neighbouring columns; thread i holds the i-th group of `vector` neighbours and moves it
with one instruction of up to 16 bytes. If a row ends inside a strip, the threads past its end load the row's last
columns again and store nothing. Where a warp, or a few threads of it, have a row of their own, a strip is the same
columns of several rows; the number of the row then differs between these threads. Spread strips have every other, or
fourth, or eighth vector of the groups of 128 lanes.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, strided
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_WIDEST: Final = 16  # bytes of one access
_BANKS: Final = 8  # accesses of 16 bytes at once
_GLOBAL: Final = 1  # LLVM's address space
_NUMBER: Final = plgpu.Layout.WG_SPLAT(())


@dataclass(frozen=True)
class Strip:
    """The columns that a warpgroup processes.

    Attributes:
        block: First column of the block of lanes that contains the strip; a Python int if the row ends in it.
        lane: The strip's first lane.
        columns: End of the row (or of the loaded piece).
        lanes: Lanes of a block.
        vector: Neighbouring columns that a thread holds.
        whole: Whether the block lies entirely within the row.
        threads: Threads that have a row; not fewer than a warpgroup's under the interpreter.
        spread: Strips of a block that a warpgroup holds if they are spread: a thread then holds columns of one group of
            128 lanes. 0 if a strip is neighbouring columns.
        number: The strip's number among those, if they are spread.
    """

    block: Any
    lane: Any
    columns: int
    lanes: int
    vector: int
    whole: bool
    threads: int = WARPGROUP
    spread: int = 0
    number: int = 0

    @property
    def width(self) -> int:
        """Columns that the warpgroup holds."""
        return WARPGROUP * self.vector

    def load(self, source: Any, row: Any, interpret: Any) -> jax.Array:
        """Reads the strip from a row of a 2D reference, or from a 1D reference if there is no row.

        Columns past the row's end hold other values of the row.
        """
        if interpret:
            if self.whole:
                return _window(source, row, pl.ds(self.block + self.lane, self.width))[...]
            tail = _window(source, row, pl.ds(self.block, self.columns - self.block))[...]
            tail = jnp.pad(tail, (0, self.lanes - tail.shape[0]), mode="edge")
            return lax.dynamic_slice_in_dim(tail, self.lane, self.width)
        layout = strided(self.width)

        @inline(plgpu.RefType(), _NUMBER, _NUMBER, result=held((self.width,), layout, source.dtype))
        def load(source: Any, row: Any, start: Any) -> Any:
            column = self._column(start)
            if not self.whole:
                column = arith.minsi(column, i32(self.columns - self.vector))
            address, kind, align = self._address(source, row, column)
            registers = np.array([None], dtype=object)
            # The arrays that a row program reads are read-only.
            registers[0] = llvm.load(kind, address, alignment=align, invariant=not mgpu.utils.is_smem_ref(source))
            return fragmented(registers, layout.to_mgpu())

        return load(source, *self._place(row))

    def store(self, target: Any, row: Any, value: jax.Array, interpret: Any) -> None:
        """Writes the strip's valid columns to a row of a 2D reference."""
        if interpret:
            if self.whole:
                target[row, pl.ds(self.block + self.lane, self.width)] = value
                return
            for lane in range(0, self.columns - self.block, self.width):

                @pl.when(self.lane == lane)
                def _(lane: int = lane) -> None:
                    size = min(self.width, self.columns - self.block - lane)
                    target[row, pl.ds(self.block + lane, size)] = value[:size]

            return

        @inline(plgpu.RefType(), _NUMBER, _NUMBER, strided(self.width))
        def store(target: Any, row: Any, start: Any, value: Any) -> None:
            column = self._column(start)
            address, _, align = self._address(target, row, column)
            if self.whole:
                llvm.store(value.registers.item(), address, alignment=align)
                return
            with mgpu.when(self._inside(column)):
                llvm.store(value.registers.item(), address, alignment=align)

        store(target, *self._place(row), value)

    def mask(self, value: jax.Array, unit: float, interpret: Any) -> jax.Array:
        """Replaces float32 columns past the row's end with `unit`."""
        if self.whole:
            return value
        if interpret:
            column = self.block + self.lane + lax.iota(jnp.int32, self.width)
            return jnp.where(column < self.columns, value, jnp.float32(unit))
        layout = strided(self.width)

        @inline(_NUMBER, layout, result=held((self.width,), layout))
        def mask(start: Any, value: Any) -> Any:
            registers = value.registers.copy()
            kind = registers.item().type
            units = vectors.broadcast(kind, mgpu.c(unit, ir.F32Type.get()))
            registers[0] = arith.select(self._inside(self._column(start)), registers.item(), units)
            return fragmented(registers, value.layout)

        return mask(self._place(None)[1], value)

    def numbers(self, interpret: Any) -> jax.Array:
        """Returns the column indices within the row, as float32."""
        if interpret:
            columns: jax.Array = self.block + self.lane + lax.iota(jnp.int32, self.width)
            return columns.astype(jnp.float32)
        layout = strided(self.width)

        @inline(_NUMBER, result=held((self.width,), layout))
        def numbers(start: Any) -> Any:
            f32 = ir.F32Type.get()
            kind = ir.VectorType.get((self.vector,), f32)
            first = vectors.broadcast(kind, arith.sitofp(f32, self._column(start)))
            constant: Any = arith.constant
            others = constant(kind, ir.DenseElementsAttr.get(np.arange(self.vector, dtype=np.float32), type=kind))
            registers = np.array([arith.addf(first, others)], dtype=object)
            return fragmented(registers, layout.to_mgpu())

        return numbers(self._place(None)[1])

    def _place(self, row: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(0 if row is None else row, jnp.int32), jnp.asarray(self.block + self.lane, jnp.int32)

    def _column(self, start: Any) -> Any:
        """Returns the first column of the thread."""
        thread = arith.remui(thread_of_warpgroup(), i32(self.threads))
        if self.spread:
            return arith.addi(start.registers.item(), spread_lane(thread, self.spread, self.vector, self.number))
        return arith.addi(start.registers.item(), arith.muli(thread, i32(self.vector)))

    def _inside(self, column: Any) -> Any:
        # Row lengths are multiples of the vector, so a thread's columns are all valid or all past the end.
        return arith.cmpi(arith.CmpIPredicate.slt, column, i32(self.columns))

    def _address(self, ref: Any, row: Any, column: Any) -> tuple[Any, Any, int]:
        """Returns the address of the thread's columns, their type, and their alignment in bytes."""
        i64, kind = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type)
        offset = arith.extsi(i64, column)
        if len(kind.shape) > 1:
            wide = arith.extsi(i64, row.registers.item())
            offset = arith.addi(offset, arith.muli(wide, mgpu.c(kind.shape[-1], i64)))
        base = mgpu.utils.memref_ptr(ref)
        if not mgpu.utils.is_smem_ref(ref):
            base = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), base)
        address = mgpu.utils.getelementptr(base, [offset], kind.element_type)
        size = self.vector * mgpu.utils.bitwidth(kind.element_type) // 8
        return address, ir.VectorType.get((self.vector,), kind.element_type), min(size, _WIDEST)


def threads_of_group(strips: int, vector: int) -> int:
    """Returns how many threads hold a group of 128 lanes if strips are spread."""
    return WARPGROUP // (strips * vector)


def spread_lane(thread: Any, strips: int, vector: int, number: int) -> Any:
    """Returns the first of a thread's lanes in a spread strip, within the warpgroup's lanes.

    A strip has every `threads_of_group`-th vector of a group, so that the first steps of the group's tree add strips.
    In groups that are in the same banks of shared memory strips are exchanged, which leaves pairs at each distance.
    """
    each = threads_of_group(strips, vector)
    group, place = arith.divui(thread, i32(each)), arith.remui(thread, i32(each))
    turns = min(strips, max(1, _BANKS // each))
    turned = arith.xori(i32(number), arith.remui(group, i32(turns)))
    neighbours = arith.addi(place, arith.muli(turned, i32(each)))
    return arith.addi(arith.muli(group, i32(WARPGROUP)), arith.muli(neighbours, i32(vector)))


def _window(source: Any, row: Any, columns: Any) -> Any:
    return source.at[columns] if row is None else source.at[row, columns]
