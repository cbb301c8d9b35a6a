"""TF32 products with wgmma rows from registers, loaded from (K, N) weights in shared memory.

Pallas's `wgmma` takes float32 operands only from shared memory, along K. The instruction itself also takes rows from
registers, which allows any memory order.
"""

import math
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.tile import i32

_K: Final = 8  # elements of K in one instruction
_SQUARE: Final = 32  # elements of a swizzled row
_ROW_BYTES: Final = 128
_TILE_BYTES: Final = 8 * _ROW_BYTES  # 8 swizzled rows
_REGISTERS: Final = 4  # of a thread, for the rows of one instruction


def load_rows(tile: Any, first: int, k: int, n: int, transforms: Any) -> jax.Array:
    """Reads this warpgroup's 64 columns of a tile as wgmma's rows; warpgroup i takes columns from 64 i on.

    Args:
        tile: (K, n) of float32 in shared memory, in (8, 32) tiles, swizzled over 128 bytes.
        first: First row that is read, a multiple of 8.
        k: Rows that are read, a multiple of 8.
        n: Columns.
        transforms: Transforms of `tile`.

    Returns:
        (64, k), a bundle of registers in the order that `multiply` expects.
    """
    return inline(plgpu.RefType(transforms), result=_registers(64, k))(lambda ref: _load(ref, first, k, n))(tile)


def multiply(
    accumulator: jax.Array, rows: jax.Array, columns: Any, first: int, length: int, transforms: Any
) -> jax.Array:
    """Starts to add products, and waits until no others are in flight.

    The rows of products in flight must not change: with two sets of registers, one is read from shared memory while the
    other is multiplied. ptxas would make the products of a single set wait for one another.

    Args:
        accumulator: (64, columns), float32.
        rows: (64, k), from `load_rows`.
        columns: (pieces, columns, length / pieces) of float32 in shared memory, in (8, 32) tiles, swizzled over 128
            bytes.
        first: The first element of K among the columns', a multiple of 8.
        length: Elements of K of the columns.
        transforms: Transforms of `columns`.

    Returns:
        The accumulator, to which the products are still being added: see `finish`.
    """
    (_, size), k, pieces = accumulator.shape, rows.shape[1], columns.shape[0]
    # Bytes from 8 columns to the next 8, and from 32 elements of K to the next.
    group_bytes = length // pieces // _SQUARE * _TILE_BYTES
    square_bytes = _TILE_BYTES if pieces == 1 else size * _ROW_BYTES

    @inline(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(transforms), result=_registers(64, size))
    def add(sums: Any, left: Any, right: Any) -> Any:
        left = mgpu.optimization_barrier(left)
        total = mgpu.WGMMAAccumulator.from_registers(sums)  # fenced
        shape, layout = total._value.registers.shape, total._value.layout
        registers = list(total._value.registers.flat)
        parts = _scalars(left)
        descriptor = _descriptor(right, group_bytes)
        for i in range(k // _K):
            at = first + i * _K
            offset = at // _SQUARE * square_bytes + at % _SQUARE * 4
            taken = parts[_REGISTERS * i : _REGISTERS * (i + 1)]
            registers = _wgmma(registers, taken, llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS))
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        return fragmented(np.array(registers, dtype=object).reshape(shape), layout).to_layout(mgpu.WGMMA_LAYOUT)

    return add(accumulator, rows, columns)


def finish(accumulator: jax.Array) -> jax.Array:
    """Waits for the products in flight and returns the accumulator."""

    @inline(plgpu.Layout.WGMMA, result=_registers(64, accumulator.shape[1]))
    def wait(sums: Any) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(sums)

    return wait(accumulator)


_NO_FLAGS: Final = llvm.IntegerOverflowFlags.none


def _registers(rows: int, columns: int) -> Any:
    return held((rows, columns), plgpu.Layout.WGMMA)


def _load(tile: Any, first: int, k: int, n: int) -> Any:
    """Returns this thread's elements, for every 8 of K: (row, K) = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4).

    g is the thread's number in its warp over 4, t the rest. In each read, threads with even t take t and the others t +
    4, or vice versa, so a warp covers all 32 banks.
    """
    base, thread = utils.memref_ptr(tile), mgpu.thread_idx()
    t = arith.andi(thread, i32(3))
    odd = arith.andi(t, i32(1))
    is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, i32(1))
    places = {}
    for reading in range(2):
        at = arith.addi(t, arith.muli(arith.xori(odd, i32(reading)), i32(4)))  # in 8 of K
        for half in range(2):
            places[reading, half] = _place(thread, at, half)
    scalars: list[Any] = []
    for i in range(k // _K):
        step = i32((first // _K + i) * (n // _SQUARE) * _TILE_BYTES)
        read = {key: _load_one(base, arith.addi(place, step)) for key, place in places.items()}
        for upper in (0, 1):
            scalars += [arith.select(is_odd, read[1 - upper, half], read[upper, half]) for half in (0, 1)]
    return _bundle(scalars, k)


def _place(thread: Any, at: Any, half: int) -> Any:
    """Returns the byte offset of row `at` of 8 at this thread's column: g, or g + 8 for the other half."""
    g = arith.andi(arith.shrui(thread, i32(2)), i32(7))
    warp = arith.andi(arith.shrui(thread, i32(5)), i32(3))
    warpgroup = arith.shrui(thread, i32(7))
    square = arith.addi(arith.muli(warpgroup, i32(2)), arith.shrui(warp, i32(1)))
    chunk = arith.addi(arith.muli(arith.andi(warp, i32(1)), i32(4)), arith.shrui(g, i32(2)))
    place = arith.muli(arith.xori(arith.addi(chunk, i32(2 * half)), at), i32(16))
    place = arith.addi(place, arith.muli(arith.andi(g, i32(3)), i32(4)))
    place = arith.addi(place, arith.muli(at, i32(_ROW_BYTES)))
    return arith.addi(place, arith.muli(square, i32(_TILE_BYTES)))


def _bundle(scalars: list[Any], k: int) -> Any:
    """Returns registers as an array (64, k) in wgmma's layout, two per register of the array."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, k))
    array = np.empty(math.prod(shape), dtype=object)
    for i in range(array.size):
        array[i] = llvm.insertelement(llvm.mlir_undef(pair), scalars[2 * i], i32(0))
        array[i] = llvm.insertelement(array[i], scalars[2 * i + 1], i32(1))
    return fragmented(array.reshape(shape), mgpu.WGMMA_LAYOUT)


def _scalars(bundle: Any) -> list[Any]:
    """Returns the 32-bit registers of a bundle in the order of `_load`."""
    integer = ir.IntegerType.get_signless(32)
    return [
        llvm.bitcast(integer, vector.extract(pair, dynamic_position=[], static_position=[i]))
        for pair in bundle.registers.flat
        for i in range(2)
    ]


def _load_one(base: Any, offset: Any) -> Any:
    return llvm.load(ir.F32Type.get(), utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8)))


def _descriptor(columns: Any, group_bytes: int) -> Any:
    """Returns wgmma's descriptor of columns along K, swizzled over 128 bytes."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(columns))
    start = llvm.lshr(llvm.and_(address, _long(0x3FFFF)), _long(4))
    return llvm.or_(start, _long(1 << 62 | group_bytes >> 4 << 32 | 1 << 16))


def _wgmma(accumulator: list[Any], rows: list[Any], descriptor: Any) -> list[Any]:
    """Issues one instruction: (64, 8) rows in registers by (8, N) columns."""
    count = len(accumulator)
    outputs = ",".join(f"${i}" for i in range(count))
    inputs = ",".join(f"${i}" for i in range(2 * count, 2 * count + _REGISTERS))
    one = ir.VectorType.get((1,), ir.F32Type.get())
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([one] * count),
        [*accumulator, *rows, descriptor],
        f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{2 * count}k8.f32.tf32.tf32"
        f" {{{outputs}}}, {{{inputs}}}, ${2 * count + _REGISTERS}, p, 1, 1; }}",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * _REGISTERS + ["l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(one, struct, [i]) for i in range(count)]


def _long(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(64))
