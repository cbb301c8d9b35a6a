"""Values that are not finite: a query that sees one has nan in all of its results, one that does not is not changed."""

import functools
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas_kernels.attention.hopper.zero_fill import CHUNK, chunks_of_row, not_finite_bits
from pallas_kernels.parts.hopper.inline import held, inline
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.tile import TILE, i32, thread_of_warp, thread_of_warpgroup, tiled

_AT_ONCE: Final = 2  # keys that a warp reads at once
_NOWHERE: Final = 2**31 - 1


def mark_not_finite(tile: jax.Array, left: Any, marks: Any, stamp: Any, interpret: bool) -> None:
    """Writes a stamp to a word of shared memory if one of the first rows of a tile is not finite.

    Args:
        tile: (64, n) float32.
        left: Number of the rows, int32; may be larger than 64 or negative.
        marks: Shared memory (1,) int32.
        stamp: int32.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        bad = ~jnp.isfinite(tile).all(axis=1) & (lax.iota(jnp.int32, tile.shape[0]) < left)
        marks[...] = jnp.where(bad.any(), stamp, marks[...])
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(TILE, number, number, plgpu.RefType())
    def mark(tile: Any, left: Any, stamp: Any, marks: Any) -> None:
        f32, thread, zero = ir.F32Type.get(), thread_of_warpgroup(), mgpu.c(0.0, ir.F32Type.get())
        upper = arith.addi(
            arith.muli(arith.divui(thread, i32(32)), i32(16)), arith.divui(arith.remui(thread, i32(32)), i32(4))
        )
        pairs = tile.registers.reshape(tile.registers.shape[1], 2)
        for half in range(2):
            sums = [zero] * 4  # of elements times zero: 0 or nan
            for j, pair in enumerate(pairs[:, half]):
                for i in range(2):
                    at = (2 * j + i) % 4
                    sums[at] = mgpu.utils.inline_ptx(
                        "fma.rn.f32 $0, $1, $2, $3;", element(pair, i), zero, sums[at], result_types=f32
                    )
            found = functools.reduce(arith.addf, sums)
            bad = arith.cmpf(arith.CmpFPredicate.UNO, found, found)
            there = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(upper, i32(8 * half)), left.registers.item())
            with mgpu.when(arith.andi(bad, there)):
                memref.store(stamp.registers.item(), marks, [mgpu.c(0, ir.IndexType.get())])

    mark(tile, jnp.asarray(left, jnp.int32), jnp.asarray(stamp, jnp.int32), marks)


def zero_fill_values(ref: Any, columns: int, end: Any, marks: Any, stamp: Any, interpret: bool) -> None:
    """Zero-fills the values of keys that are not finite, which a weight of zero would not mask.

    The caller follows up with `commit_smem` before a tensor core reads them.

    Args:
        ref: Shared memory (64, n) of 16-bit keys, stored as `tile.tiled` says.
        columns: The columns that are values, a multiple of 128.
        end: The end of the keys that a query may see, int32; a key before it that is not finite is marked.
        marks: Shared memory (1,) int32.
        stamp: What is written there.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rows = ref.shape[0]
    if interpret:
        read = ref[...]
        bad = ~jnp.isfinite(read[:, :columns].astype(jnp.float32)).all(axis=1)
        value = lax.broadcasted_iota(jnp.int32, read.shape, 1) < columns
        ref[...] = jnp.where(bad[:, None] & value, jnp.zeros((), ref.dtype), read)
        seen = bad & (lax.iota(jnp.int32, rows) < end)
        marks[...] = jnp.where(seen.any(), stamp, marks[...])
        return
    number = plgpu.Layout.WG_SPLAT(())
    multiply = f"fma.rn.{'bf' if ref.dtype == jnp.bfloat16 else 'f'}16x2 $0, $1, $2, $3;"

    @inline(plgpu.RefType(tiled(ref.dtype, ref.shape[1])), number, number, plgpu.RefType())
    def zero_fill(ref: Any, end: Any, stamp: Any, marks: Any) -> None:
        # Tiles of 8 rows are consecutive, row by row; swizzling permutes bytes within a row. Two threads share a row.
        # Chunks of 16 bytes are visited in rotated order to avoid bank conflicts.
        word = ir.IntegerType.get_signless(32)
        kind, (_, squares, _, width) = ir.VectorType.get((4,), word), ir.MemRefType(ref.type).shape
        per_row, half = width * 2 // CHUNK, columns // width // 2
        base, thread, zero = mgpu.utils.memref_ptr(ref), thread_of_warpgroup(), i32(0)
        row, side = arith.divui(thread, i32(2)), arith.remui(thread, i32(2))
        place = arith.muli(arith.divui(row, i32(8)), i32(8 * per_row * squares))
        place = arith.addi(place, arith.muli(arith.remui(row, i32(8)), i32(per_row)))
        place = arith.addi(place, arith.muli(side, i32(8 * per_row * half)))
        chunks = chunks_of_row(base, place, row, per_row, half)
        bits = not_finite_bits(chunks, multiply, zero)  # a sum is -0 for a negative number: only the exponents tell
        bits = arith.ori(bits, mgpu.utils.shfl_bfly(bits, 1))
        bad = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(bits, i32(0x7FFF7FFF)), zero)
        with mgpu.when(bad):
            for chunk in chunks:
                llvm.store(vector.broadcast(kind, zero), chunk)
        seen = arith.cmpi(arith.CmpIPredicate.slt, row, end.registers.item())
        with mgpu.when(arith.andi(bad, seen)):
            memref.store(stamp.registers.item(), marks, [mgpu.c(0, ir.IndexType.get())])

    zero_fill(ref, jnp.asarray(end, jnp.int32), jnp.asarray(stamp, jnp.int32), marks)


def first_not_finite(
    cache: Any, table: Any, columns: int, sequence: Any, begin: Any, end: Any, interpret: bool
) -> jax.Array:
    """Returns the first key of a range whose values are not finite, int32; `2**31 - 1` if there is none.

    It is slow and runs only where a result is not finite. Each warp looks at all keys.

    Args:
        cache: (B, S, 1, n) 16-bit keys in GPU memory; or (P, page, 1, n) with pages.
        table: (B, entries) int32, the pages of each sequence, or None. Entries outside of the cache become others.
        columns: The columns that are values, a multiple of 512.
        sequence: Index of the sequence.
        begin: The first key.
        end: The end of the keys.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    count, page, _, width = cache.shape
    if interpret:
        keys = cache[...][:, :, 0, :columns].astype(jnp.float32)
        keys = keys[sequence] if table is None else keys[jnp.clip(table[...][sequence], 0, count - 1)]
        bad = ~jnp.isfinite(keys).all(axis=-1).reshape(-1)
        place = lax.iota(jnp.int32, bad.shape[0])
        return jnp.min(jnp.where(bad & (place >= begin) & (place < end), place, _NOWHERE))
    number = plgpu.Layout.WG_SPLAT(())
    multiply = f"fma.rn.{'bf' if cache.dtype == jnp.bfloat16 else 'f'}16x2 $0, $1, $2, $3;"
    refs = [plgpu.RefType()] * (1 if table is None else 2)

    @inline(*refs, number, number, number, result=held((), number, jnp.int32))
    def look(cache: Any, *given: Any) -> Any:
        *tables, sequence, begin, end = given
        index, word, long = (ir.IndexType.get(), *(ir.IntegerType.get_signless(n) for n in (32, 64)))
        kind, zero = ir.VectorType.get((4,), word), i32(0)
        sequence, begin, end = (x.registers.item() for x in (sequence, begin, end))
        base, lane, last = mgpu.utils.memref_ptr(cache), thread_of_warp(), arith.subi(end, i32(1))
        steps = arith.divui(arith.addi(arith.maxsi(arith.subi(end, begin), zero), i32(_AT_ONCE - 1)), i32(_AT_ONCE))

        def entry(key: Any) -> Any:
            if not tables:
                first = arith.muli(arith.extsi(long, sequence), mgpu.c(page, long))
                return arith.addi(first, arith.extsi(long, key))
            at = [arith.index_cast(index, x) for x in (sequence, arith.divui(key, i32(page)))]
            found = arith.minsi(arith.maxsi(memref.load(tables[0], at), zero), i32(count - 1))
            first = arith.muli(arith.extsi(long, found), mgpu.c(page, long))
            return arith.addi(first, arith.extsi(long, arith.remui(key, i32(page))))

        def among(first: Any) -> Any:
            """Returns the first such key among a few, the same for all threads of a warp."""
            found, keys = i32(_NOWHERE), [arith.minsi(arith.addi(first, i32(i)), last) for i in range(_AT_ONCE)]
            loads = []
            for key in keys:
                place = arith.muli(entry(key), mgpu.c(width * 2 // CHUNK, long))
                place = arith.addi(place, arith.extui(long, lane))
                loads.append(
                    [
                        llvm.load(kind, mgpu.utils.getelementptr(base, [arith.addi(place, mgpu.c(at, long))], kind))
                        for at in range(0, columns * 2 // CHUNK, 32)
                    ]
                )
            for key, chunks in zip(keys, loads, strict=True):
                total = zero
                for chunk in chunks:
                    for i in range(4):
                        total = mgpu.utils.inline_ptx(multiply, element(chunk, i), zero, total, result_types=word)
                bad = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(total, i32(0x7FFF7FFF)), zero)
                found = arith.minsi(found, arith.select(bad, key, i32(_NOWHERE)))
            return mgpu.utils.inline_ptx(
                "redux.sync.min.s32 $0, $1, 0xffffffff;", found, result_types=word, has_side_effects=True
            )

        @mgpu.fori(steps, i32(_NOWHERE))  # type: ignore[untyped-decorator]
        def nearest(step: Any, found: Any) -> Any:
            more = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, found, i32(_NOWHERE)), [word], has_else=True)  # type: ignore[call-arg]
            with ir.InsertionPoint(more.then_block):
                scf.yield_([among(arith.addi(begin, arith.muli(step, i32(_AT_ONCE))))])
            with ir.InsertionPoint(more.else_block):
                scf.yield_([found])
            return more.result

        smallest = nearest.result
        return mgpu.FragmentedArray.splat(smallest, (), is_signed=True)

    numbers = [jnp.asarray(x, jnp.int32) for x in (sequence, begin, end)]
    return look(*([cache] if table is None else [cache, table]), *numbers)
