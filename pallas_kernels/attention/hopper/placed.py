"""Pieces of rows of GPU memory that lie anywhere, one for each row of a tile: numbers as a tile, and words of bits.

Threads read them: TMA takes neither a row for several rows of a tile nor rows of 4 bytes.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import number_of
from pallas_kernels.parts.hopper.tile import ROW, ROWS, TILE, i32, thread_of_warpgroup

_WORD: Final = 32


def rows_at(ref: Any, places: jax.Array, start: Any, columns: int, interpret: bool) -> jax.Array:
    """Returns a tile (64, columns) of the dtype of the memory.

    Args:
        ref: GPU memory (..., n), n even and at least start + columns; or (..., 1), a number for all columns.
        places: (64,) int32, the row of the memory, over all its leading axes, that each row of the tile has; or (), one
            for all of them.
        start: The first column, int32, a multiple of 2.
        columns: A multiple of 8.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    width = ref.shape[-1]
    if interpret:
        return _piece(ref[...].reshape(-1, width)[jnp.broadcast_to(places, (ROWS,))], start, columns)
    result = held((ROWS, columns), TILE, ref.dtype)

    @inline(plgpu.RefType(), _layout(places), plgpu.Layout.WG_SPLAT(()), result=result)
    def load(ref: Any, places: Any, start: Any) -> Any:
        kind = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), kind)
        base, own = mgpu.utils.memref_ptr(ref), arith.muli(arith.remui(thread_of_warpgroup(), i32(4)), i32(2))
        registers = np.empty((columns // 8, 2), dtype=object)
        for half in range(2):
            row = _long(number_of(places.registers.flat[half % places.registers.size]))
            if width == 1:
                number = llvm.load(kind, mgpu.utils.getelementptr(base, [row], kind))
                registers[:, half] = vector.broadcast(pair, number)
                continue
            column = _long(arith.addi(start.registers.item(), own))
            first = arith.addi(arith.muli(row, mgpu.c(width, column.type)), column)
            first = mgpu.utils.getelementptr(base, [first], kind)
            for j in range(columns // 8):
                registers[j, half] = llvm.load(pair, mgpu.utils.getelementptr(first, [8 * j], kind))
        shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, columns))
        return fragmented(registers.reshape(shape), mgpu.WGMMA_LAYOUT)

    return load(ref, places, jnp.asarray(start, jnp.int32))


def words_at(ref: Any, places: jax.Array, start: Any, count: int, interpret: bool) -> tuple[jax.Array, ...]:
    """Returns `count` neighbouring words of a row of GPU memory for each row of a tile, (64,) int32 each.

    Args:
        ref: GPU memory (..., n) int32, n at least start + count; or (..., 1), a word that stands for all.
        places: (64,) int32, the row of the memory, over all its leading axes, that each row of the tile has; or (), one
            for all of them.
        start: The first word, int32, a multiple of `count`.
        count: 1, 2 or 4, a divisor of n.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    width = ref.shape[-1]
    if interpret:
        found = _piece(ref[...].reshape(-1, width)[jnp.broadcast_to(places, (ROWS,))], start, count)
        return tuple(found[:, i] for i in range(count))
    result = (held((ROWS,), ROW, jnp.int32),) * count

    @inline(plgpu.RefType(), _layout(places), plgpu.Layout.WG_SPLAT(()), result=result)
    def load(ref: Any, places: Any, start: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(ref)
        layout = mgpu.WGMMA_LAYOUT.reduce((1,))
        found = [np.empty(layout.registers_shape((ROWS,)), dtype=object) for _ in range(count)]
        for half in range(2):
            row = _long(number_of(places.registers.flat[half % places.registers.size]))
            if width == 1:
                words = [llvm.load(word, mgpu.utils.getelementptr(base, [row], word))] * count
            else:
                first = arith.addi(arith.muli(row, mgpu.c(width, row.type)), _long(start.registers.item()))
                read = llvm.load(ir.VectorType.get((count,), word), mgpu.utils.getelementptr(base, [first], word))
                words = [number_of(read, i) for i in range(count)]
            for registers, number in zip(found, words, strict=True):
                registers.flat[half] = vector.broadcast(ir.VectorType.get((layout.vector_length,), word), number)
        return tuple(fragmented(registers, layout, signed=True) for registers in found)

    return load(ref, places, jnp.asarray(start, jnp.int32))


def packed_bits(x: jax.Array) -> jax.Array:
    """Returns booleans (..., n) as words (..., n / 32) int32: column 32 w + i is bit i of word w."""
    bits = x.reshape(*x.shape[:-1], -1, _WORD).astype(jnp.uint32) << lax.iota(jnp.uint32, _WORD)
    return lax.bitcast_convert_type(bits.sum(axis=-1, dtype=jnp.uint32), jnp.int32)


def _layout(places: jax.Array) -> Any:
    return ROW if places.ndim else plgpu.Layout.WG_SPLAT(())


def _piece(rows: jax.Array, start: Any, columns: int) -> jax.Array:
    if rows.shape[1] == 1:
        return jnp.broadcast_to(rows, (ROWS, columns))
    return lax.dynamic_slice_in_dim(rows, start, columns, axis=1)


def _long(number: Any) -> Any:
    return arith.extsi(ir.IntegerType.get_signless(64), number)
