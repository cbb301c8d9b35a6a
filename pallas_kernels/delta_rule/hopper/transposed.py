"""Tiles of 64 rows that a warpgroup holds transposed: its rows are the columns of what lies in memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, scf, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, joined, with_element
from pallas_kernels.parts.hopper.tile import PLAIN, ROWS, TILE, WARP, i32, thread_of_warpgroup

_SQUARES = 4  # squares of 8 x 8 numbers of one instruction


def load_transposed(ref: Any, interpret: bool) -> jax.Array:
    """Loads the transpose of a tile of 16-bit numbers.

    Args:
        ref: Shared memory (1, 64, 64), stored as `tile.PLAIN` says.
        interpret: Whether the kernel runs in Mosaic's interpreter.

    Returns:
        (64, 64) of the same dtype.
    """
    if interpret:
        read: jax.Array = ref[0].T
        plgpu.commit_smem()
        return read
    dtype = ref.dtype

    @inline(plgpu.RefType(PLAIN), result=held((ROWS, ROWS), TILE, dtype))
    def load(ref: Any) -> Any:
        layout, word = mgpu.WGMMA_LAYOUT, ir.IntegerType.get_signless(32)
        kind = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(ROWS * ROWS // 256, dtype=object)
        base = _address(ref)
        for at in range(0, registers.size, _SQUARES):
            struct = llvm.inline_asm(
                llvm.StructType.get_literal([word] * _SQUARES),
                [arith.addi(base, i32(at // _SQUARES * 2048))],
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,r,~{memory}",
                asm_dialect=0,
                has_side_effects=True,
            )
            for i in range(_SQUARES):
                one = vector.broadcast(ir.VectorType.get((1,), word), llvm.extractvalue(word, struct, [i]))
                registers[at + i] = vector.bitcast(kind, one)
        return fragmented(registers.reshape(layout.registers_shape((ROWS, ROWS))), layout)

    return load(ref)


def store_transposed(tile: jax.Array, ref: Any, interpret: bool) -> None:
    """Writes the transpose of a tile to shared memory, and ends with a fence for TMA; there is no barrier.

    Args:
        tile: (64, 64) of 16-bit numbers.
        ref: Shared memory (1, 64, 64) of the same dtype, stored as `tile.PLAIN` says, no longer read by any thread.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        ref[0] = tile.T
        plgpu.commit_smem()
        return

    @inline(TILE, plgpu.RefType(PLAIN))
    def write(tile: Any, ref: Any) -> None:
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        words = [element(vector.bitcast(word, register), 0) for register in tile.registers.flat]
        base = _address(ref)
        for at in range(0, len(words), _SQUARES):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(base, i32(at // _SQUARES * 2048)), *words[at : at + _SQUARES]],
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                "r,r,r,r,r,~{memory}",
                asm_dialect=0,
                has_side_effects=True,
            )
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    write(tile, ref)


def load_matrix(ref: Any, rows: int, interpret: bool, known: Any = None) -> jax.Array:
    """Loads the transpose of float32 numbers in GPU memory, (64, rows).

    Args:
        ref: GPU memory (rows, 64).
        rows: A multiple of 8.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        known: int32; for 0 all numbers are 0, whatever is in memory.
    """
    if interpret:
        numbers: jax.Array = ref[...].T
        return numbers if known is None else jnp.where(known == 0, 0, numbers)
    given = () if known is None else (jnp.int32(known),)

    @inline(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(given), result=held((ROWS, rows), TILE))
    def load(ref: Any, *known: Any) -> Any:
        there = [arith.cmpi(arith.CmpIPredicate.ne, k.registers.item(), i32(0)) for k in known]
        zero = mgpu.c(0.0, ir.F32Type.get())
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, rows)), dtype=object)
        for at, place in zip(np.ndindex(registers.shape), layout.thread_idxs((ROWS, rows)), strict=True):
            register = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
            for i in range(2):
                number = memref.load(ref, _swapped(place, i))
                for condition in there:
                    number = arith.select(condition, number, zero)
                register = with_element(register, i, number)
            registers[at] = register
        return fragmented(registers, layout)

    return load(ref, *given)


def store_matrix(tile: jax.Array, ref: Any, interpret: bool) -> None:
    """Writes the transpose of a tile (64, n) to GPU memory (n, 64) of the same dtype."""
    if interpret:
        ref[...] = tile.T
        return

    @inline(TILE, plgpu.RefType())
    def write(tile: Any, ref: Any) -> None:
        layout = mgpu.WGMMA_LAYOUT
        for register, place in zip(tile.registers.flat, layout.thread_idxs(tile.shape), strict=True):
            for i in range(2):
                memref.store(element(register, i), ref, _swapped(place, i))

    write(tile, ref)


def nan_for_infinite(tile: jax.Array, interpret: bool) -> jax.Array:
    """Returns a tile (64, n) of 16-bit numbers with nan for infinities: x + 0 * x, which changes no finite number."""
    if interpret:
        return jnp.where(jnp.isfinite(tile), tile, jnp.nan).astype(tile.dtype)

    @inline(TILE, result=held(tile.shape, TILE, tile.dtype))
    def replace(tile: Any) -> Any:
        registers, word = tile.registers.copy(), ir.IntegerType.get_signless(32)
        kind = registers.flat[0].type
        text = f"{{ .reg .b32 none; mov.b32 none, 0; fma.rn.{ir.VectorType(kind).element_type}x2 $0, $1, none, $1; }}"
        for at, register in enumerate(registers.flat):
            packed = element(vector.bitcast(ir.VectorType.get((1,), word), register), 0)
            one = mgpu.utils.inline_ptx(text, packed, result_types=word)
            registers.flat[at] = vector.bitcast(kind, vector.broadcast(ir.VectorType.get((1,), word), one))
        return fragmented(registers, tile.layout)

    return replace(tile)


def widened(tile: jax.Array, interpret: bool) -> jax.Array:
    """Returns a tile (64, n) of bfloat16 numbers in float32, by an instruction for each."""
    if interpret or tile.dtype != jnp.bfloat16:
        return tile.astype(jnp.float32)

    @inline(TILE, result=held(tile.shape, TILE))
    def widen(tile: Any) -> Any:
        word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        registers = tile.registers.copy()
        for at, register in enumerate(registers.flat):
            packed = element(vector.bitcast(ir.VectorType.get((1,), word), register), 0)
            texts = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"
            pair = [mgpu.utils.inline_ptx(t, packed, result_types=word) for t in texts]
            registers.flat[at] = joined([arith.bitcast(f32, one) for one in pair])
        return fragmented(registers, tile.layout)

    return widen(tile)


def keep_rows(count: Any, kept: jax.Array, tile: jax.Array, interpret: bool) -> jax.Array:
    """Returns a transposed tile with its first rows replaced.

    Args:
        count: How many rows, int32; usually none.
        kept: (64, 64) transposed, with these rows.
        tile: (64, 64) transposed, of the same dtype.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        return jnp.where(jnp.arange(ROWS) < count, kept, tile)

    @inline(plgpu.Layout.WG_SPLAT(()), TILE, TILE, result=held((ROWS, ROWS), TILE, tile.dtype))
    def replace(count: Any, kept: Any, tile: Any) -> Any:
        count, registers = count.registers.item(), tile.registers.copy()
        some = arith.cmpi(arith.CmpIPredicate.sgt, count, i32(0))
        branches: Any = scf.IfOp  # the generated class, whose arguments are others, to mypy
        branch = branches(some, [register.type for register in registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            found = []
            places = mgpu.WGMMA_LAYOUT.thread_idxs((ROWS, ROWS))
            for old, new, (_, row) in zip(registers.flat, kept.registers.flat, places, strict=True):
                row = row if row.type == count.type else arith.index_cast(count.type, row)
                mixed = old
                for i in range(2):
                    first = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, i32(i)), count)
                    mixed = with_element(mixed, i, arith.select(first, element(new, i), element(old, i)))
                found.append(mixed)
            scf.yield_(found)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(registers.flat))
        for at in range(registers.size):
            registers.flat[at] = branch.results[at]
        return fragmented(registers, tile.layout)

    return replace(jnp.int32(count), kept, tile)


def flag_nan(tiles: tuple[jax.Array, ...], flags: Any, place: Any, interpret: bool) -> None:
    """Writes to GPU memory, flags (n,) int32, 1 at `place` if a float32 tile has a nan, and 0 if not.

    All threads of the warpgroup can read it afterwards.
    """
    if interpret:
        flags[place] = jnp.array([jnp.isnan(tile).any() for tile in tiles]).any().astype(jnp.int32)
        return

    @inline(*[TILE] * len(tiles), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
    def write(*given: Any) -> None:
        *tiles, flags, place = given
        at = [arith.index_cast(ir.IndexType.get(), place.registers.item())]
        first = arith.cmpi(arith.CmpIPredicate.eq, thread_of_warpgroup(), i32(0))
        with mgpu.when(first):
            memref.store(i32(0), flags, at)
        bad = mgpu.c(0, ir.IntegerType.get_signless(1))
        for register in (register for tile in tiles for register in tile.registers.flat):
            for i in range(2):
                number = element(register, i)
                bad = arith.ori(bad, arith.cmpf(arith.CmpFPredicate.UNO, number, number))
        mgpu.utils.warpgroup_barrier()
        with mgpu.when(bad):
            memref.store(i32(1), flags, at)
        mgpu.utils.warpgroup_barrier()

    write(*tiles, flags, jnp.int32(place))


def _swapped(place: Any, i: int) -> list[Any]:
    """Returns the indices of a register's element in the transposed array."""
    row, column = place
    index = ir.IndexType.get()
    row, column = (x if x.type == index else arith.index_cast(index, x) for x in (row, column))
    return [arith.addi(column, mgpu.c(i, index)), row]


def _address(ref: Any) -> Any:
    """Returns the address that a lane gives for the first instruction; the next ones are 16 rows further each.

    Lane i has row i % 8 of square i / 8. The squares are two times the 16 columns of a warp.
    """
    lane, warp = arith.remui(thread_of_warpgroup(), i32(WARP)), arith.divui(thread_of_warpgroup(), i32(WARP))
    row, square = arith.remui(lane, i32(8)), arith.divui(lane, i32(8))
    half, group = arith.remui(square, i32(2)), arith.divui(square, i32(2))
    piece = arith.xori(arith.addi(arith.muli(warp, i32(2)), half), row)
    place = arith.addi(arith.muli(group, i32(1024)), arith.addi(arith.muli(row, i32(128)), arith.muli(piece, i32(16))))
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
    return arith.addi(base, place)
