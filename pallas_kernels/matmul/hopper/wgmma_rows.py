"""Products with wgmma's rows from registers, loaded from 8 to 64 columns of weights in shared memory.

An instruction of wgmma waits for the one before only as long as the tensor core takes if its rows are in registers;
from shared memory it reads 2 KiB of rows first. The columns of the weights are the rows; where there are fewer than 64,
only the first warps have any, and the other rows of the product are meaningless.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.matmul.hopper.narrow_tile import Columns, column_of
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.products import accumulated, accumulator
from pallas_kernels.parts.hopper.registers import joined
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_STEP_BYTES: Final = 32  # of K in one instruction
_ROW_BYTES: Final = 128
_CHUNK: Final = 16  # bytes of a swizzle unit
_TILE_BYTES: Final = 8 * _ROW_BYTES  # 8 swizzled rows
_REGISTERS: Final = 4  # of a thread, for the rows of one instruction
_LAST: Final = 2  # instructions after which no rows are read: those have arrived when they are multiplied
_NO_FLAGS: Final = llvm.IntegerOverflowFlags.none


def load_rows(tile: Any, first: int, k: int, transforms: Any) -> jax.Array:
    """Reads the columns of a tile as wgmma's rows.

    Args:
        tile: (K, n) in shared memory, n from 8 (16 for 2-byte elements) to 64, in tiles of 8 rows swizzled over up to
            128 bytes; or (pieces, n, K / pieces), swizzled over 128 bytes.
        first: First element of K that is read, a multiple of an instruction's.
        k: Elements of K that are read, the same.
        transforms: Transforms of `tile`.

    Returns:
        A bundle of registers in the order that `begin` expects.
    """
    shape, size = tile.shape, jnp.dtype(tile.dtype).itemsize

    @inline(plgpu.RefType(transforms), result=held((64, k * size // 4), plgpu.Layout.WGMMA))
    def load(tile: Any) -> Any:
        return bundle([word for read in _reads(tile, shape, first, k, size) for word in read()])

    return load(tile)


def begin_in_memory(
    total: jax.Array, tile: Any, columns: Any, first: int, length: int, head: int, transforms: Any
) -> jax.Array:
    """Starts to add the first products of some rows in shared memory, and waits until no others are in flight.

    These products wait in line, so what comes until others follow is hidden.

    Args:
        total: (64, columns), float32.
        tile: (1, n, length), weights in shared memory along K, swizzled over 128 bytes. If n is less than 64, what lies
            after them is read as further rows, which are meaningless.
        columns: (pieces, columns, length / pieces), the same.
        first: The first element of K.
        length: Elements of K of the stage.
        head: Number of instructions.
        transforms: Transforms of both.

    Returns:
        The accumulator, to which the products are still being added: see `finish`.
    """
    layout, shape = plgpu.Layout.WGMMA, tile.shape

    @inline(layout, *[plgpu.RefType(transforms)] * 2, result=held(total.shape, layout))
    def add(sums: Any, tile: Any, columns: Any) -> Any:
        sums = mgpu.optimization_barrier(sums)
        nvvm.wgmma_fence_aligned()
        numbers, size = accumulated(sums), total.shape[1]
        kind = ir.MemRefType(columns.type).element_type
        width = mgpu.utils.bitwidth(kind) // 8
        step = _STEP_BYTES // width
        left, right = _places(tile, length, shape[1], 1 if shape[1] == 64 else 2), _places(columns, length, size)
        for i in range(first // step, first // step + head):
            numbers = _wgmma(numbers, [left(i)], right(i), step, "tf32" if width == 4 else str(kind))
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        return accumulator(numbers, size)

    return add(total, tile, columns)


def begin(
    total: jax.Array, rows: jax.Array, columns: Any, first: int, length: int, head: int, transforms: Any
) -> jax.Array:
    """Starts to add the first products of some rows, and waits until no others are in flight.

    An instruction with rows in registers is not issued before the tensor core has taken the one before. So what comes
    after the last one of many has little time, and little may come between `begin` and `go_on`.

    Args:
        total: (64, columns), float32.
        rows: From `load_rows` or `go_on`.
        columns: (pieces, columns, length / pieces) in shared memory, in tiles of 8 rows swizzled over 128 bytes.
        first: The first element of K among the columns'.
        length: Elements of K of the columns.
        head: Number of instructions.
        transforms: Transforms of `columns`.

    Returns:
        The accumulator, to which the products are still being added: see `finish`.
    """
    layout = plgpu.Layout.WGMMA

    @inline(layout, layout, plgpu.RefType(transforms), result=held(total.shape, layout))
    def add(sums: Any, rows: Any, columns: Any) -> Any:
        sums, rows = mgpu.optimization_barrier(sums, rows)
        nvvm.wgmma_fence_aligned()
        numbers, parts = accumulated(sums), _words(rows)
        issue = _issuer(columns, first, length, total.shape[1])
        for i in range(head):
            numbers = issue(numbers, parts, i)
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        return accumulator(numbers, total.shape[1])

    return add(total, rows, columns)


def go_on(
    total: jax.Array,
    rows: jax.Array,
    columns: Any,
    first: int,
    length: int,
    head: int,
    tile: Any,
    next_first: int,
    transforms: tuple[Any, Any],
    apart: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Starts to add the other products of some rows, and meanwhile reads as many rows for the next.

    The rows of products in flight must not change: there are two sets of registers, and those of the set before have
    ended since `begin`. ptxas would make the products of a single set wait for one another.

    Args:
        total: (64, columns), float32.
        rows: From `load_rows` or `go_on`.
        columns: As for `begin`.
        first: The first element of K among the columns'.
        length: Elements of K of the columns.
        head: Number of instructions that `begin` has issued.
        tile: The next rows, as for `load_rows`.
        next_first: The first row of `tile`.
        transforms: Transforms of `columns` and of `tile`.
        apart: Whether `begin_in_memory` has issued the first instructions, whose rows are left out.

    Returns:
        The accumulator, and the next rows.
    """
    layout, shape, size = plgpu.Layout.WGMMA, tile.shape, jnp.dtype(tile.dtype).itemsize
    types = held(total.shape, layout), held(rows.shape, layout)

    @inline(layout, layout, *(plgpu.RefType(one) for one in transforms), result=types)
    def add(sums: Any, rows: Any, columns: Any, tile: Any) -> Any:
        numbers, parts = accumulated(sums), _words(rows)
        left_out = head * _STEP_BYTES // size if apart else 0
        issue = _issuer(columns, first + left_out, length, total.shape[1])
        steps, start = len(parts) // _REGISTERS, 0 if apart else head
        reads, words = _reads(tile, shape, next_first + left_out, steps * _STEP_BYTES // size, size), []
        each = -(-steps // max(1, steps - start - _LAST))
        for i in range(start, steps):
            numbers = issue(numbers, parts, i)
            words += [word for read in reads[:each] for word in read()]
            reads = reads[each:]
        words += [word for read in reads for word in read()]
        nvvm.wgmma_commit_group_sync_aligned()
        return accumulator(numbers, total.shape[1]), bundle(words)

    return add(total, rows, columns, tile)


def _places(ref: Any, length: int, size: int, rows: int = 1) -> Any:
    """Returns a function that returns wgmma's descriptor for a step.

    Args:
        ref: An operand in shared memory, along K.
        length: Elements of K.
        size: Rows or columns.
        rows: wgmma's rows for one of the operand's: with 2, every second 8 are meaningless, as where `load_rows` reads.
    """
    kind, pieces = ir.MemRefType(ref.type).element_type, ir.MemRefType(ref.type).shape[0]
    width = mgpu.utils.bitwidth(kind) // 8
    square, step = _ROW_BYTES // width, _STEP_BYTES // width
    descriptor = _descriptor(ref, length // pieces // square * _TILE_BYTES // rows)

    def place(i: int) -> Any:
        at = i * step
        offset = at // square * (_TILE_BYTES if pieces == 1 else size * _ROW_BYTES) + at % square * width
        return llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS)

    return place


def _issuer(columns: Any, first: int, length: int, size: int) -> Any:
    """Returns a function that issues the product of a step and returns the accumulator's registers."""
    kind, pieces = ir.MemRefType(columns.type).element_type, ir.MemRefType(columns.type).shape[0]
    width = mgpu.utils.bitwidth(kind) // 8
    square, step = _ROW_BYTES // width, _STEP_BYTES // width
    # Bytes from 8 columns to the next 8, and from a swizzled row of K to the next.
    group_bytes = length // pieces // square * _TILE_BYTES
    square_bytes = _TILE_BYTES if pieces == 1 else size * _ROW_BYTES
    descriptor = _descriptor(columns, group_bytes)

    def issue(numbers: list[Any], parts: list[Any], i: int) -> list[Any]:
        at = first + i * step
        offset = at // square * square_bytes + at % square * width
        place = llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS)
        taken = parts[_REGISTERS * i : _REGISTERS * (i + 1)]
        return _wgmma(numbers, taken, place, step, "tf32" if width == 4 else str(kind))

    return issue


def multiply(total: jax.Array, rows: jax.Array, columns: Any, first: int, length: int, transforms: Any) -> jax.Array:
    """Starts to add products, and waits until no others are in flight.

    The rows of products in flight must not change: with two sets of registers, one is read from shared memory while the
    other is multiplied. ptxas would make the products of a single set wait for one another.

    Args:
        total: (64, columns), float32.
        rows: From `load_rows`.
        columns: (pieces, columns, length / pieces) in shared memory, in tiles of 8 rows swizzled over 128 bytes.
        first: The first element of K among the columns'.
        length: Elements of K of the columns.
        transforms: Transforms of `columns`.

    Returns:
        The accumulator, to which the products are still being added: see `finish`.
    """
    (_, size), pieces, width = total.shape, columns.shape[0], jnp.dtype(columns.dtype).itemsize
    square, step = _ROW_BYTES // width, _STEP_BYTES // width
    # Bytes from 8 columns to the next 8, and from a swizzled row of K to the next.
    group_bytes = length // pieces // square * _TILE_BYTES
    square_bytes = _TILE_BYTES if pieces == 1 else size * _ROW_BYTES

    @inline(
        plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(transforms), result=held((64, size), plgpu.Layout.WGMMA)
    )
    def add(sums: Any, left: Any, right: Any) -> Any:
        sums, left = mgpu.optimization_barrier(sums, left)
        nvvm.wgmma_fence_aligned()
        numbers, parts = accumulated(sums), _words(left)
        kind = ir.MemRefType(right.type).element_type
        descriptor = _descriptor(right, group_bytes)
        for i in range(len(parts) // _REGISTERS):
            at = first + i * step
            offset = at // square * square_bytes + at % square * width
            taken = parts[_REGISTERS * i : _REGISTERS * (i + 1)]
            place = llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS)
            numbers = _wgmma(numbers, taken, place, step, "tf32" if width == 4 else str(kind))
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(1)
        return accumulator(numbers, size)

    return add(total, rows, columns)


def finish(total: jax.Array) -> jax.Array:
    """Waits for the products in flight and returns the accumulator."""

    @inline(plgpu.Layout.WGMMA, result=held(total.shape, plgpu.Layout.WGMMA))
    def wait(sums: Any) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(sums)

    return wait(total)


def bundle(registers: list[Any]) -> Any:
    """Returns registers of 32 bits as an array in wgmma's layout, two per register of the array."""
    number, array = ir.F32Type.get(), np.empty(len(registers) // 2, dtype=object)
    numbers = [one if one.type == number else llvm.bitcast(number, one) for one in registers]
    for i in range(array.size):
        array[i] = joined(numbers[2 * i : 2 * i + 2])
    return fragmented(array.reshape(mgpu.WGMMA_LAYOUT.registers_shape((64, 2 * len(numbers)))), mgpu.WGMMA_LAYOUT)


def _reads(tile: Any, shape: tuple[int, ...], first: int, k: int, size: int) -> list[Callable[[], list[Any]]]:
    """Returns for every step of K a function that reads a thread's four registers of it."""
    thread, n = thread_of_warpgroup(), shape[1]
    if len(shape) == 3:
        return _reads_along_k(tile, shape, first, k, size)
    if size == 4:
        return _reads_of_words(tile, first, k, n, thread)
    lane, warp = arith.andi(thread, i32(31)), arith.shrui(thread, i32(5))
    line, across = arith.andi(lane, i32(7)), arith.remui(warp, i32(n // 8))
    if n == 64:
        # The addresses of lanes 0 to 7 are rows 0 to 7 of the first 8 columns, then of the next 8, then rows 8 to 15.
        line = arith.addi(line, arith.muli(arith.shrui(lane, i32(4)), i32(8)))
        across = arith.addi(arith.muli(warp, i32(2)), arith.andi(arith.shrui(lane, i32(3)), i32(1)))
    turn = arith.andi(arith.shrui(arith.muli(line, i32(2 * n)), i32(7)), i32(n // 8 - 1))
    place = arith.addi(arith.muli(line, i32(2 * n)), arith.muli(arith.xori(across, turn), i32(_CHUNK)))
    base = arith.addi(_shared_address(tile), place)

    def text(at: int) -> str:
        if n == 64:
            return f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4+{at * 2 * n}];"
        load = "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16"
        return f"{load} {{$0}}, [$4+{at * 2 * n}]; {load} {{$2}}, [$4+{(at + 8) * 2 * n}];"

    return [functools.partial(_read, text(at), [base]) for at in range(first, first + k, 16)]


def _reads_of_words(tile: Any, first: int, k: int, n: int, thread: Any) -> list[Callable[[], list[Any]]]:
    """The same for 4-byte elements: the upper and the lower row at t of K, then at t + 4."""
    t, square = arith.andi(thread, i32(3)), min(n, _ROW_BYTES // 4)
    row_bytes, squares = 4 * square, n // square
    base, places = _shared_address(tile), []
    for upper in (0, 1):
        for half in (0, 1) if n == 64 else (0,):
            column = arith.andi(column_of(half, Columns(n, dealt=True)), i32(n - 1))
            inside, line = arith.andi(column, i32(square - 1)), arith.addi(t, i32(4 * upper))
            turn = arith.andi(arith.shrui(arith.muli(line, i32(row_bytes)), i32(7)), i32(square // 4 - 1))
            chunk = arith.xori(arith.shrui(inside, i32(2)), turn)
            place = arith.addi(arith.muli(line, i32(row_bytes)), arith.muli(chunk, i32(_CHUNK)))
            place = arith.addi(place, arith.muli(arith.andi(inside, i32(3)), i32(4)))
            place = arith.addi(place, arith.muli(arith.divui(column, i32(square)), i32(8 * row_bytes)))
            places.append(arith.addi(base, place))
    results = range(_REGISTERS) if n == 64 else (0, 2)

    def text(at: int) -> str:
        offset = at // 8 * squares * 8 * row_bytes
        return " ".join(f"ld.shared.b32 ${r}, [${_REGISTERS + i}+{offset}];" for i, r in enumerate(results))

    return [functools.partial(_read, text(at), places) for at in range(first, first + k, 8)]


def _reads_along_k(tile: Any, shape: tuple[int, ...], first: int, k: int, size: int) -> list[Callable[[], list[Any]]]:
    """The same for weights stored along K, of 2 or 4 bytes an element: `ldmatrix` gives thread (g, t) word t of line g.

    A warp with 16 columns reads a step at once: 16 bytes of its first 8 columns and of its others, then the next 16.
    """
    (pieces, n, width), thread, square = shape, thread_of_warpgroup(), _ROW_BYTES // size
    group_bytes = width // square * _TILE_BYTES
    square_bytes = _TILE_BYTES if pieces == 1 else n * _ROW_BYTES
    lane, group = arith.andi(thread, i32(31)), arith.shrui(thread, i32(5))
    line, matrix = arith.andi(lane, i32(7)), arith.shrui(lane, i32(3))
    chunk, chunks = i32(0), _ROW_BYTES // _CHUNK
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16"
    if n == 64:
        chunk, chunks = arith.shrui(matrix, i32(1)), chunks // 2
        group = arith.addi(arith.muli(group, i32(2)), arith.andi(matrix, i32(1)))
        load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    place = arith.muli(arith.andi(group, i32(n // 8 - 1)), i32(group_bytes))
    place = arith.addi(place, arith.muli(line, i32(_ROW_BYTES)))
    place = arith.addi(place, arith.muli(arith.xori(chunk, line), i32(_CHUNK)))
    base, each = arith.addi(_shared_address(tile), place), _ROW_BYTES // chunks
    # A swizzled row is 1024-byte aligned, so other chunks of it differ in a few bits of the address.
    places = [arith.xori(base, i32(at)) for at in range(0, _ROW_BYTES, each)]

    def read(at: int) -> list[Any]:
        first, offset = at % square * size // each, at // square * square_bytes
        if n == 64:
            return _read(f"{load} {{$0, $1, $2, $3}}, [$4+{offset}];", [places[first]])
        text = f"{load} {{$0}}, [$4+{offset}]; {load} {{$2}}, [$5+{offset}];"
        return _read(text, places[first : first + 2])

    return [functools.partial(read, at) for at in range(first, first + k, _STEP_BYTES // size)]


def _read(text: str, addresses: list[Any]) -> list[Any]:
    """Reads shared memory into four registers; those that no instruction writes stay undefined."""
    word = i32(0).type
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * _REGISTERS),
        addresses,
        text,
        ",".join(["=r"] * _REGISTERS + ["r"] * len(addresses)),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(_REGISTERS)]


def _shared_address(ref: Any) -> Any:
    """Returns the address of shared memory, 32 bits."""
    return llvm.ptrtoint(i32(0).type, utils.memref_ptr(ref))


def _words(bundle: Any) -> list[Any]:
    """Returns the 32-bit registers of a bundle in order."""
    return [
        llvm.bitcast(i32(0).type, vector.extract(pair, dynamic_position=[], static_position=[i]))
        for pair in bundle.registers.flat
        for i in range(2)
    ]


def _descriptor(columns: Any, group_bytes: int) -> Any:
    """Returns wgmma's descriptor of columns along K, swizzled over 128 bytes."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(columns))
    start = llvm.lshr(llvm.and_(address, _long(0x3FFFF)), _long(4))
    return llvm.or_(start, _long(1 << 62 | group_bytes >> 4 << 32 | 1 << 16))


def _wgmma(sums: list[Any], rows: list[Any], descriptor: Any, k: int, kind: str) -> list[Any]:
    """Issues one instruction: (64, k) rows in registers by (k, N) columns."""
    count, shared = len(sums), len(rows) == 1
    outputs = ",".join(f"${i}" for i in range(count))
    inputs = ",".join(f"${i}" for i in range(2 * count, 2 * count + len(rows)))
    inputs = inputs if shared else f"{{{inputs}}}"
    flags = "p, 1, 1" if kind == "tf32" else "p, 1, 1, 0, 0" if shared else "p, 1, 1, 0"
    number = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        [*sums, *rows, descriptor],
        f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{2 * count}k{k}.f32.{kind}.{kind}"
        f" {{{outputs}}}, {inputs}, ${2 * count + len(rows)}, {flags}; }}",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l" if shared else "r"] * len(rows) + ["l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(count)]


def _long(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(64))
