"""Products of 8-bit keys or values, read from shared memory into registers as wgmma's rows, and 8 columns.

No 16-bit copies pass through shared memory. `ldmatrix` distributes the bytes to threads, two at a time:

- Of a key a thread has the four columns 4 t to 4 t + 3 of every 16, t its index modulo 4, while wgmma's rows have the
  columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The columns of a step of 16 are thus permuted, which changes no bit: wgmma
  adds all of them at once. The queries must be permuted as well, see `scale_queries`.
- Of transposed values, a thread has neighbouring columns of two keys. Row r of the 16 rows of a warp is column
  2 (r mod 8) + r / 8 of the values.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.attention.hopper.columns import COLUMNS, Tile
from pallas_kernels.attention.hopper.widen import in_units, widening
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.products import (
    accumulated,
    accumulator,
    one_step,
    ref_type,
    start,
    steps,
    tile_type,
)
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.tile import ROWS, TILE, i32, thread_of_warpgroup, tiled
from pallas_kernels.parts.ptx import hexadecimal

_STEP: Final = 16  # elements of K in one instruction
_GROUP: Final = 8  # rows of a tile of swizzled memory
_CHUNK: Final = 16  # bytes of a swizzle unit and of an `ldmatrix` row
_PAIRS: Final = (0, 2, 1, 3)  # bytes of two keys, by column


def scale_queries(queries: Any, factors: Any, unit: float, interpret: bool) -> None:
    """Multiplies queries by the scales of their keys, and permutes their columns for `start_keys`.

    In the interpreter the columns are not permuted.

    Args:
        queries: Shared memory (8, H) of 16-bit numbers, stored as `tile.tiled` says. The products may read it next.
        factors: (H,) float32 in GPU memory.
        unit: The unit of `EightBitContract`.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    more = 1 / unit
    if interpret:
        products = queries[...].astype(jnp.float32) * (factors[...] * jnp.float32(more))[None]
        queries[...] = products.astype(queries.dtype)
        plgpu.commit_smem()
        return
    kind = "bf16" if queries.dtype == jnp.bfloat16 else "f16"
    text = (
        "{ .reg .b16 a, b; .reg .f32 x, y, f, g; mov.b32 {a, b}, $1;"
        f" cvt.f32.{kind} x, a; mul.rn.f32 f, $2, {hexadecimal(more)}; mul.rn.f32 x, x, f;"
        f" cvt.f32.{kind} y, b; mul.rn.f32 g, $3, {hexadecimal(more)}; mul.rn.f32 y, y, g;"
        f" cvt.rn.{kind}x2.f32 $0, y, x; }}"
    )

    @inline(ref_type(queries), plgpu.RefType())
    def scale(ref: Any, factors: Any) -> None:
        # A thread has 16 columns of a row; the even ones of their 8 words go first.
        _, squares, _, width = ir.MemRefType(ref.type).shape
        word, byte, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), ir.F32Type.get()
        kind, in_row, row_bytes = ir.VectorType.get((4,), word), width // _STEP, width * 2
        thread = thread_of_warpgroup()
        row, place = arith.remui(thread, i32(_GROUP)), arith.divui(thread, i32(_GROUP))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, place, i32(squares * in_row))):
            square, own = arith.divui(place, i32(in_row)), arith.remui(place, i32(in_row))
            base = _sum(_times(square, _GROUP * row_bytes), _times(row, row_bytes))
            moved = row if row_bytes == 128 else arith.shrui(row, i32(1))
            pointers = [
                mgpu.utils.getelementptr(
                    mgpu.utils.memref_ptr(ref),
                    [_sum(base, _times(arith.xori(_sum(_times(own, 2), i32(half)), moved), _CHUNK))],
                    byte,
                )
                for half in range(2)
            ]
            chunks = [llvm.load(kind, pointer) for pointer in pointers]
            words = []
            for at, number in enumerate(element(chunk, i) for chunk in chunks for i in range(4)):
                start = [_sum(_times(place, _STEP), i32(2 * at))]
                pair = llvm.load(
                    ir.VectorType.get((2,), f32),
                    mgpu.utils.getelementptr(mgpu.utils.memref_ptr(factors), start, f32),
                )
                operands = number, element(pair, 0), element(pair, 1)
                words.append(mgpu.utils.inline_ptx(text, *operands, result_types=word))
            for half in range(2):
                found = llvm.mlir_undef(kind)
                for i in range(4):
                    found = llvm.insertelement(found, words[2 * i + half], i32(i))
                llvm.store(found, pointers[half])

    scale(queries, factors)
    plgpu.commit_smem()


def start_keys(stored: Any, queries: Any, fp8: bool, interpret: bool) -> Tile:
    """Starts keys @ queries^T: keys are bytes in units of `EightBitContract`.

    All bytes of the keys have been read after `products.finish` and a barrier of the threads.

    Args:
        stored: Shared memory (128, H) int8, stored as `tile.tiled` says.
        queries: Shared memory (8, H), from `scale_queries`.
        fp8: Whether bytes are float8_e4m3fn; else int8.
        interpret: Whether the kernel runs in Mosaic's interpreter.

    Returns:
        (128, 8) float32, valid only after `products.finish`.
    """
    rows, columns = stored.shape
    if interpret:
        keys = in_units(stored[...], queries.dtype, fp8)
        low, high = (start(None, (keys[at : at + ROWS],), (queries,), interpret=True) for at in range(0, rows, ROWS))
        return low, high
    types = (plgpu.RefType(tiled(jnp.int8, columns)), ref_type(queries))

    @inline(*types, result=(tile_type(COLUMNS),) * 2)
    def issue(stored: Any, queries: Any) -> Any:
        kind = ir.MemRefType(queries.type).element_type
        text = widening(fp8, str(kind))
        at = _Place(stored)
        # Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of a warp at one step, 2 and 3 at the next.
        group = _sum(_times(at.warp, 2), arith.andi(at.matrix, i32(1)))
        base, turn = at.row(group), arith.xori(arith.shrui(at.matrix, i32(1)), at.swizzle)
        places = [_sum(base, _times(arith.xori(turn, i32(step)), _CHUNK)) for step in range(0, columns // _STEP, 2)]
        found = []
        for tile in range(rows // ROWS):
            read = [_load(_sum(place, i32(tile * ROWS * columns)), transposed=False) for place in places]
            words = [[pair[0], pair[1]] for four in read for pair in (four[:2], four[2:])]
            operands = []
            for pair in words:
                low, high = (_widen(text, word) for word in pair)
                operands.append([low[0], high[0], low[1], high[1]])
            found.append(_multiply(None, operands, queries, kind))
        return tuple(found)

    low, high = issue(stored, queries)
    return low, high


def start_values(
    totals: tuple[jax.Array, ...],
    stored: Any,
    weights: Any,
    fp8: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Starts totals + values^T @ weights^T, with values widened from bytes as in `start_keys`.

    Args:
        totals: (64, 8) float32 for each 64 columns of the values; in the interpreter rows are columns in natural order.
        stored: Shared memory (128, V) int8, stored as `tile.tiled` says.
        weights: Shared memory (8, 128) of 16-bit numbers.
        fp8: Whether bytes are float8_e4m3fn; else int8.
        interpret: Whether the kernel runs in Mosaic's interpreter.

    Returns:
        Tiles as `totals`, valid only after `products.finish`.
    """
    rows, columns = stored.shape
    if interpret:
        values = in_units(stored[...], weights.dtype, fp8)
        return tuple(
            start(total, (values[:, i * ROWS : (i + 1) * ROWS],), (weights,), left_along=False, interpret=True)
            for i, total in enumerate(totals)
        )
    types = (plgpu.RefType(tiled(jnp.int8, columns)), ref_type(weights), *[TILE] * len(totals))

    @inline(*types, result=(tile_type(COLUMNS),) * len(totals))
    def issue(stored: Any, weights: Any, *totals: Any) -> Any:
        kind = ir.MemRefType(weights.type).element_type
        text = widening(fp8, str(kind), _PAIRS)
        at = _Place(stored)
        # A matrix has 8 keys; a warp has 16 columns of every 64.
        base, turn = at.row(at.matrix), arith.xori(at.warp, at.swizzle)
        found = []
        for tile, total in enumerate(totals):
            chunk = arith.xori(turn, i32(tile * ROWS // _CHUNK))
            place = _sum(base, _times(chunk, _CHUNK))
            read = [_load(_sum(place, i32(key * columns)), transposed=True) for key in range(0, rows, 2 * _STEP)]
            operands = []
            for four in read:
                for pair in (four[:2], four[2:]):
                    low, high = (_widen(text, word) for word in pair)
                    operands.append([*low, *high])
            found.append(_multiply(total, operands, weights, kind))
        return tuple(found)

    return issue(stored, weights, *totals)


class _Place:
    """The position of a thread's `ldmatrix` row in a tile of bytes.

    Attributes:
        warp: Number of the warp in its warpgroup.
        matrix: Index of the 8 by 8 matrix for which this thread provides a row.
        swizzle: XOR mask of the index of a chunk.
    """

    def __init__(self, ref: Any) -> None:
        _, squares, _, width = ir.MemRefType(ref.type).shape
        if squares != 1:
            raise ValueError(f"expected rows of one swizzled tile, got {ref.type}.")
        thread = thread_of_warpgroup()
        lane, self.warp = arith.andi(thread, i32(31)), arith.shrui(thread, i32(5))
        self.matrix, self._row = arith.shrui(lane, i32(3)), arith.andi(lane, i32(7))
        self.swizzle = self._row if width == 128 else arith.shrui(self._row, i32(1))
        self._width = width
        self._base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))

    def row(self, group: Any) -> Any:
        """Returns the address of the thread's row of a group of 8 rows."""
        return _sum(self._base, _times(group, _GROUP * self._width), _times(self._row, self._width))


def _multiply(total: Any, operands: list[list[Any]], right: Any, kind: Any) -> Any:
    """Issues a product of words in registers, four per step, as a separate wgmma group."""
    sums = [] if total is None else accumulated(mgpu.optimization_barrier(total))
    nvvm.wgmma_fence_aligned()
    for row, (column,) in zip(operands, steps((right,), True), strict=True):
        sums = one_step(sums, COLUMNS // 2, row, column, kind, "0")
    nvvm.wgmma_commit_group_sync_aligned()
    return accumulator(sums, COLUMNS)


def _widen(text: str, word: Any) -> list[Any]:
    # A side effect keeps it before the fence of the products.
    return list(mgpu.utils.inline_ptx(text, word, result_types=[word.type] * 2, has_side_effects=True))


def _load(address: Any, transposed: bool) -> list[Any]:
    """Reads four matrices of 8 by 8 pairs of bytes."""
    word = i32(0).type
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * 4),
        [address],
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(4)]


def _times(number: Any, factor: int) -> Any:
    return arith.muli(number, i32(factor))


def _sum(first: Any, *others: Any) -> Any:
    for other in others:
        first = arith.addi(first, other)
    return first
