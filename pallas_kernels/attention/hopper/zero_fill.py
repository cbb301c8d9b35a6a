"""Zero-fills rows of shared memory that a zero weight would not mask: unseen rows, nan and infinities."""

import functools
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import count, element, number_of, with_number
from pallas_kernels.parts.hopper.tile import ROW, i32, thread_of_warpgroup, tiled

WORD: Final = 32
"""Rows of one word of `zero_fill_rows`."""

CHUNK: Final = 16
"""Bytes that a thread reads at once."""


def zero_fill_rows(ref: Any, first: jax.Array, end: jax.Array, found: Any, interpret: bool) -> None:
    """Zero-fills rows of 16-bit shared memory that are outside [first, end) or contain nan or infinities.

    Args:
        ref: (rows, n) bfloat16 or float16, stored as `tile.tiled` says; rows is a multiple of 32 up to 128.
        first: The first row to keep, int32.
        end: The end of the rows to keep, int32.
        found: Shared memory (rows / 32,) int32. Bit i of word w becomes 1 if row 32 w + i, of [first, end), was not
            finite, and 0 if it was.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rows, columns = ref.shape
    if interpret:
        row, read = lax.iota(jnp.int32, rows), ref[...]
        inside = (row >= first) & (row < end)
        bad = inside & ~jnp.isfinite(read.astype(jnp.float32)).all(axis=1)
        ref[...] = jnp.where((inside & ~bad)[:, None], read, jnp.zeros((), ref.dtype))
        found[...] = packed_bits(bad)
        return
    number = plgpu.Layout.WG_SPLAT(())
    multiply = f"fma.rn.{'bf' if ref.dtype == jnp.bfloat16 else 'f'}16x2 $0, $1, $2, $3;"

    @inline(plgpu.RefType(tiled(ref.dtype, columns)), number, number, plgpu.RefType())
    def zero_fill(ref: Any, first: Any, end: Any, found: Any) -> None:
        # Tiles of 8 rows are consecutive, row by row; swizzling permutes bytes within a row. A thread has a row. Its
        # chunks of 16 bytes are visited in rotated order to avoid 8-way bank conflicts.
        _, squares, _, width = ir.MemRefType(ref.type).shape
        per_row = width * 2 // CHUNK
        base, thread, zero = mgpu.utils.memref_ptr(ref), thread_of_warpgroup(), i32(0)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(rows))):
            place = arith.muli(arith.divui(thread, i32(8)), i32(8 * per_row * squares))
            place = arith.addi(place, arith.muli(arith.remui(thread, i32(8)), i32(per_row)))
            chunks = chunks_of_row(base, place, thread, per_row, squares)
            bits = not_finite_bits(chunks, multiply, zero)
            store_zero_filled(thread, is_within(thread, first, end), bits, chunks, found)

    zero_fill(ref, first, end, found)


def chunks_of_row(base: Any, place: Any, row: Any, per_row: int, squares: int) -> list[Any]:
    """Returns pointers to the chunks that a thread has of a row, in rotated order to avoid bank conflicts.

    Args:
        base: Pointer to the memory.
        place: Index of the row's first chunk.
        row: The row.
        per_row: Chunks of a row in a square of the memory.
        squares: Squares that the thread has of the row.
    """
    kind = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    return [
        mgpu.utils.getelementptr(
            base,
            [arith.addi(place, arith.addi(i32(part), arith.remui(arith.addi(row, i32(turn)), i32(per_row))))],
            kind,
        )
        for part in range(0, 8 * per_row * squares, 8 * per_row)
        for turn in range(per_row)
    ]


def not_finite_bits(chunks: list[Any], multiply: str, zero: Any) -> Any:
    """Returns a word that is 0, but for signs, unless the pairs of 16-bit numbers in a row have nan or infinities.

    Args:
        chunks: See `chunks_of_row`.
        multiply: The instruction that multiplies and adds pairs.
        zero: A word of zeros.
    """
    word = ir.IntegerType.get_signless(32)
    sums = [zero] * 4  # of elements times zero: 0 or nan
    for chunk in chunks:
        pairs = llvm.load(ir.VectorType.get((4,), word), chunk)
        for i in range(4):
            sums[i] = mgpu.utils.inline_ptx(multiply, element(pairs, i), zero, sums[i], result_types=word)
    return functools.reduce(arith.ori, sums)


def packed_bits(rows: jax.Array) -> jax.Array:
    """Returns a bit for each of (n,) booleans, (n / 32,) int32."""
    bits = rows.reshape(-1, WORD).astype(jnp.uint32) << lax.iota(jnp.uint32, WORD)[None]
    return bits.sum(axis=1, dtype=jnp.uint32).astype(jnp.int32)


def is_within(thread: Any, first: Any, end: Any) -> Any:
    """Returns whether a thread's row is in [first, end)."""
    return arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, thread, first.registers.item()),
        arith.cmpi(arith.CmpIPredicate.slt, thread, end.registers.item()),
    )


def store_zero_filled(thread: Any, inside: Any, bits: Any, chunks: list[Any], found: Any) -> None:
    """Zero-fills a thread's row unless it is kept, and writes the bits of non-finite rows to `found`.

    Args:
        thread: Index of the thread and of its row.
        inside: Whether to keep the row if it is finite.
        bits: 0 if it is finite.
        chunks: Addresses of its pieces of 16 bytes.
        found: As in `zero_fill_rows`.
    """
    word, zero = bits.type, i32(0)
    bad = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ne, bits, zero))
    kept = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.eq, bits, zero))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.extui(word, kept), zero)):
        for chunk in chunks:
            llvm.store(vector.broadcast(ir.VectorType.get((4,), word), zero), chunk)
    votes = mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        arith.extui(word, bad),
        result_types=word,
        has_side_effects=True,
    )
    memref.store(votes, found, [arith.index_cast(ir.IndexType.get(), arith.divui(thread, i32(WORD)))])


def poison_rows(
    total: jax.Array,
    first: jax.Array,
    end: jax.Array,
    found: Any,
    interpret: bool,
    layout: Any = ROW,
    bits: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Returns numbers, replaced by nan if their range contains a row that `zero_fill_rows` found.

    Args:
        total: (n,) float32.
        first: (n,) int32, where the ranges begin, possibly below 0.
        end: (n,) int32, where they end, possibly before their start or after the rows.
        found: Shared memory (words,) int32, from `zero_fill_rows`.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        layout: Layout of the numbers; by default one per row of a tile.
        bits: (n,) int32 for each word of `found`: the rows of the range to check; by default all.
    """
    (words,) = found.shape
    if interpret:
        row = lax.iota(jnp.int32, words * WORD)
        bad = (found[...][:, None] >> lax.iota(jnp.int32, WORD)[None] & 1).reshape(-1) != 0
        plgpu.commit_smem()  # an ordinary read, before it is written again
        inside = bad[None] & (row[None] >= first[:, None]) & (row[None] < end[:, None])
        if bits:
            chosen = jnp.stack(bits, axis=1)[:, :, None] >> lax.iota(jnp.int32, WORD) & 1
            inside = inside & (chosen.reshape(inside.shape) != 0)
        poisoned = inside.any(axis=1)
        return jnp.where(poisoned, jnp.nan, total)
    result = held(total.shape, layout)

    @inline(layout, layout, layout, plgpu.RefType(), *[layout] * len(bits), result=result)
    def poison(total: Any, first: Any, end: Any, found: Any, *chosen: Any) -> Any:
        registers, one = total.registers.copy(), mgpu.c(1, ir.IntegerType.get_signless(64))
        read = [memref.load(found, [mgpu.c(i, ir.IndexType.get())]) for i in range(words)]
        nan = mgpu.c(float("nan"), ir.F32Type.get())
        for at in range(registers.size):
            register = registers.flat[at]
            for i in range(count(register)):
                some = i32(0)
                for j, word in enumerate(read):
                    edges = [_within(number_of(x.registers.flat[at], i), j * WORD) for x in (first, end)]
                    before, until = (arith.shli(one, edge) for edge in edges)
                    inside = arith.trunci(word.type, arith.subi(until, before))
                    if chosen:
                        inside = arith.andi(inside, number_of(chosen[j].registers.flat[at], i))
                    there = arith.cmpi(arith.CmpIPredicate.slt, *edges)
                    some = arith.ori(some, arith.select(there, arith.andi(word, inside), i32(0)))
                bad = arith.cmpi(arith.CmpIPredicate.ne, some, i32(0))
                register = with_number(register, arith.select(bad, nan, number_of(register, i)), i)
            registers.flat[at] = register
        return fragmented(registers, total.layout)

    return poison(total, first, end, found, *bits)


def _within(edge: Any, start: int) -> Any:
    """Returns an edge of a range as a number of bits of the word that begins at `start`, 64 bits wide."""
    edge = arith.minsi(arith.maxsi(arith.subi(edge, i32(start)), i32(0)), i32(WORD))
    return arith.extui(ir.IntegerType.get_signless(64), edge)
