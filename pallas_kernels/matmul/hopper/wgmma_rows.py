"""Products with wgmma's rows from registers, loaded from (K, N) weights of 8 to 64 columns in shared memory.

An instruction of wgmma waits for the one before only as long as the tensor core takes if its rows are in registers;
from shared memory it reads 2 KiB of rows first. The columns of the weights are the rows; where there are fewer than 64,
only the first warps have any, and the other rows of the product are meaningless.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.products import accumulated, accumulator
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_STEP_BYTES: Final = 32  # of K in one instruction
_ROW_BYTES: Final = 128
_CHUNK: Final = 16  # bytes of a swizzle unit
_TILE_BYTES: Final = 8 * _ROW_BYTES  # 8 swizzled rows
_REGISTERS: Final = 4  # of a thread, for the rows of one instruction
_WARP_COLUMNS: Final = 16
_NO_FLAGS: Final = llvm.IntegerOverflowFlags.none


def load_rows(tile: Any, first: int, k: int, transforms: Any) -> jax.Array:
    """Reads the columns of a tile as wgmma's rows.

    Args:
        tile: (K, n) in shared memory, n from 8 (16 for 2-byte elements) to 64, in tiles of 8 rows swizzled over up to
            128 bytes.
        first: First row that is read, a multiple of an instruction's.
        k: Rows that are read, the same.
        transforms: Transforms of `tile`.

    Returns:
        A bundle of registers in the order that `multiply` expects.
    """
    (_, n), size = tile.shape, jnp.dtype(tile.dtype).itemsize
    load = _load_pairs if size == 2 else _load_words
    result = held((64, k * size // 4), plgpu.Layout.WGMMA)
    return inline(plgpu.RefType(transforms), result=result)(lambda ref: _bundle(load(ref, first, k, n)))(tile)


def column_of(half: int, n: int, size: int) -> Any:
    """Returns the column that a thread has in its upper (0) or lower (1) row of wgmma's rows; at least n for none.

    Args:
        half: Which row: the number of a thread in its warp over 4, or 8 more.
        n: Columns of the tile.
        size: Bytes of an element. With 4, columns are in the order in which threads read all banks at once.
    """
    thread = thread_of_warpgroup()
    warp, g = arith.shrui(thread, i32(5)), arith.andi(arith.shrui(thread, i32(2)), i32(7))
    if size == 2 or n == 8:
        return arith.addi(arith.muli(warp, i32(_WARP_COLUMNS)), arith.addi(g, i32(8 * half)))
    square = min(n, _ROW_BYTES // size)
    warps = square // _WARP_COLUMNS  # that read a square
    chunk = arith.addi(arith.muli(arith.remui(warp, i32(warps)), i32(2)), i32(half))
    chunk = arith.addi(chunk, arith.muli(arith.shrui(g, i32(2)), i32(square // 8)))
    column = arith.addi(arith.muli(chunk, i32(4)), arith.andi(g, i32(3)))
    return arith.addi(column, arith.muli(arith.divui(warp, i32(warps)), i32(square)))


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

    @inline(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(transforms), result=held((64, size), plgpu.Layout.WGMMA))
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


def store(total: jax.Array, out: Any, row: Any, column: Any, n: int, size: int) -> None:
    """Writes the product, transposed, to GPU memory; rows after the last one of the result are left out.

    Args:
        total: (64, columns), float32.
        out: The result (M, N).
        row: First row of the result.
        column: First column.
        n: Columns of the tile.
        size: Bytes of an element of the weights.
    """

    @inline(plgpu.Layout.WGMMA, plgpu.RefType(()), *[plgpu.Layout.WG_SPLAT(())] * 2)
    def write(sums: Any, ref: Any, row: Any, column: Any) -> None:
        (most, whole), kind = ir.MemRefType(ref.type).shape, ir.MemRefType(ref.type).element_type
        row, column = (a.registers.item() for a in (row, column))
        base, numbers = utils.memref_ptr(ref), accumulated(sums)
        t = arith.andi(thread_of_warpgroup(), i32(3))
        for half in (0, 1) if n > 8 else (0,):
            at = column_of(half, n, size)
            inside = arith.cmpi(arith.CmpIPredicate.ult, at, i32(n))
            at = arith.addi(at, column)
            for j in range(len(numbers) // 4):
                for i in (0, 1):
                    line = arith.addi(row, arith.addi(arith.muli(t, i32(2)), i32(8 * j + i)))
                    valid = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, line, i32(most)))
                    number = numbers[4 * j + 2 * half + i]
                    if kind != ir.F32Type.get():
                        number = arith.truncf(kind, number)
                    with mgpu.when(valid):
                        place = arith.addi(arith.muli(line, i32(whole)), at)
                        llvm.store(number, utils.getelementptr(base, [place], kind))

    write(total, out, *(jnp.asarray(a, jnp.int32) for a in (row, column)))


def copy_rows(weights: Any, tile: Any, row: Any, column: Any, transforms: Any) -> None:
    """Starts to copy weights from (row, column) on to a tile of shared memory with all threads; a group of copies."""
    (k, n), size, number = tile.shape, jnp.dtype(tile.dtype).itemsize, plgpu.Layout.WG_SPLAT(())
    chunks = n * size // _CHUNK  # of a row

    @inline(plgpu.RefType(()), plgpu.RefType(transforms), number, number)
    def copy(weights: Any, tile: Any, row: Any, column: Any) -> None:
        (_, whole), long = ir.MemRefType(weights.type).shape, ir.IntegerType.get_signless(64)
        thread = thread_of_warpgroup()
        line, chunk = arith.divui(thread, i32(chunks)), arith.remui(thread, i32(chunks))
        turn = arith.andi(arith.shrui(arith.muli(line, i32(chunks * _CHUNK)), i32(7)), i32(chunks - 1))
        target = arith.addi(arith.muli(line, i32(chunks)), arith.xori(chunk, turn))
        target = arith.addi(_shared_address(tile), arith.muli(target, i32(_CHUNK)))
        first = arith.muli(arith.addi(row.registers.item(), line), i32(whole))
        first = arith.addi(arith.addi(first, column.registers.item()), arith.muli(chunk, i32(_CHUNK // size)))
        source = llvm.ptrtoint(long, utils.getelementptr(utils.memref_ptr(weights), [first], ir.IntegerType.get_signless(8 * size)))
        lines = 128 // chunks  # that all threads copy at once
        texts = [
            f"cp.async.cg.shared.global.L2::128B [$0+{at * chunks * _CHUNK}], [$1+{at * whole * size}], 16;"
            for at in range(0, k, lines)
        ]
        text = " ".join([*texts, "cp.async.commit_group;"])
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [target, source], text, "r,l", asm_dialect=0, has_side_effects=True)

    copy(weights, tile, *(jnp.asarray(a, jnp.int32) for a in (row, column)))


def await_copies(after: int, tile: Any, transforms: Any) -> None:
    """Waits for all groups of copies of `copy_rows` except the last `after`."""

    @inline(plgpu.RefType(transforms))
    def wait(_: Any) -> None:
        nvvm.cp_async_wait_group(after)

    wait(tile)


def _load_pairs(tile: Any, first: int, k: int, n: int) -> list[Any]:
    """Returns a thread's pairs of 2-byte elements along K, transposed by `ldmatrix`."""
    word, thread = i32(0).type, thread_of_warpgroup()
    lane, warp = arith.andi(thread, i32(31)), arith.shrui(thread, i32(5))
    # The addresses of lanes 0 to 7 are the rows 0 to 7 of the first 8 columns, then of the next 8, then rows 8 to 15.
    line = arith.addi(arith.andi(lane, i32(7)), arith.muli(arith.shrui(lane, i32(4)), i32(8)))
    chunk = arith.addi(arith.muli(warp, i32(2)), arith.andi(arith.shrui(lane, i32(3)), i32(1)))
    turn = arith.andi(arith.shrui(arith.muli(line, i32(2 * n)), i32(7)), i32(n // 8 - 1))
    place = arith.addi(arith.muli(line, i32(2 * n)), arith.muli(arith.xori(chunk, turn), i32(_CHUNK)))
    base = arith.addi(_shared_address(tile), place)
    texts = [
        f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$[], $[], $[], $[]}}, [$(0)+{at * 2 * n}];"
        for at in range(first, first + k, 16)
    ]
    return _read(texts, [base], n)


def _load_words(tile: Any, first: int, k: int, n: int) -> list[Any]:
    """Returns a thread's 4-byte elements, for every 8 of K: upper and lower row at t of K, and at t + 4."""
    word, thread = i32(0).type, thread_of_warpgroup()
    t, square = arith.andi(thread, i32(3)), min(n, _ROW_BYTES // 4)
    row_bytes, squares = 4 * square, n // square
    base, places = _shared_address(tile), {}
    for half in (0, 1):
        column = arith.andi(column_of(half, n, 4), i32(n - 1))
        inside = arith.andi(column, i32(square - 1))
        for upper in (0, 1):
            line = arith.addi(t, i32(4 * upper))
            turn = arith.andi(arith.shrui(arith.muli(line, i32(row_bytes)), i32(7)), i32(square // 4 - 1))
            chunk = arith.xori(arith.shrui(inside, i32(2)), turn)
            place = arith.addi(arith.muli(line, i32(row_bytes)), arith.muli(chunk, i32(_CHUNK)))
            place = arith.addi(place, arith.muli(arith.andi(inside, i32(3)), i32(4)))
            place = arith.addi(place, arith.muli(arith.divui(column, i32(square)), i32(8 * row_bytes)))
            places[upper, half] = arith.addi(base, place)
    order = list(places)
    words = _read(
        [
            f"ld.shared.b32 $[], [$({order.index((upper, half))})+{at // 8 * squares * 8 * row_bytes}];"
            for at in range(first, first + k, 8)
            for upper in (0, 1)
            for half in ((0, 1) if n > 8 else (0,))
        ],
        [places[key] for key in order],
        n,
    )
    return words if n > 8 else [word for one in words for word in (one, one)]


def _read(texts: list[str], addresses: list[Any], n: int) -> list[Any]:
    """Reads shared memory in the warps that have columns; a branch around each read would make descriptors vectors.

    Args:
        texts: The instructions: "$[]" are their results in order, "$(i)" are addresses.
        addresses: Addresses, 32 bits.
        n: Columns of the tile.

    Returns:
        The results, 32 bits each.
    """
    word, text = i32(0).type, " ".join(texts)
    count = text.count("$[]")
    for i in range(count):
        text = text.replace("$[]", f"${i}", 1)
    for i in range(len(addresses)):
        text = text.replace(f"$({i})", f"${count + i}")
    if n <= 48:
        live = arith.cmpi(
            arith.CmpIPredicate.ult, arith.shrui(thread_of_warpgroup(), i32(5)), i32(-(-n // _WARP_COLUMNS))
        )
        addresses = [*addresses, arith.extui(word, live)]
        test = f"setp.ne.b32 p, ${count + len(addresses) - 1}, 0;"
        text = f"{{ .reg .pred p; {test} @!p bra.uni NONE; {text} NONE: }}"
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * count),
        addresses,
        text,
        ",".join(["=r"] * count + ["r"] * len(addresses)),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(count)]


def _shared_address(ref: Any) -> Any:
    """Returns the address of shared memory, 32 bits."""
    return llvm.ptrtoint(i32(0).type, utils.memref_ptr(ref))


def _bundle(words: list[Any]) -> Any:
    """Returns registers as an array in wgmma's layout, two per register of the array."""
    pair, number = ir.VectorType.get((2,), ir.F32Type.get()), ir.F32Type.get()
    array = np.empty(len(words) // 2, dtype=object)
    for i in range(array.size):
        array[i] = llvm.insertelement(llvm.mlir_undef(pair), llvm.bitcast(number, words[2 * i]), i32(0))
        array[i] = llvm.insertelement(array[i], llvm.bitcast(number, words[2 * i + 1]), i32(1))
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, len(words) * 2))
    return fragmented(array.reshape(shape), mgpu.WGMMA_LAYOUT)


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
    count = len(sums)
    outputs = ",".join(f"${i}" for i in range(count))
    inputs = ",".join(f"${i}" for i in range(2 * count, 2 * count + _REGISTERS))
    flags = "p, 1, 1" if kind == "tf32" else "p, 1, 1, 0"
    number = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        [*sums, *rows, descriptor],
        f"{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{2 * count}k{k}.f32.{kind}.{kind}"
        f" {{{outputs}}}, {{{inputs}}}, ${2 * count + _REGISTERS}, {flags}; }}",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * _REGISTERS + ["l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(count)]


def _long(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(64))
