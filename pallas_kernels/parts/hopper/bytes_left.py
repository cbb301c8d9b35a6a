"""Products of 8-bit keys or values, read from shared memory into registers as wgmma's rows, and 8 columns.

No 16 bits of them pass through shared memory. Bytes reach a thread as `ldmatrix` deals them out, two at a time:

- Of a key a thread has the four columns 4 t to 4 t + 3 of every 16, t its number modulo 4, where wgmma's rows have the
  columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. So the products of a step of 16 are added in another order, which moves no
  bit: wgmma adds all of them at once. The queries must lie so as well, see `turn_queries`.
- Of values, turned, a thread has neighbouring columns of two keys. Row r of the 16 rows of a warp is column
  2 (r mod 8) + r / 8 of the values.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.parts.hopper.columns import COLUMNS, Tile
from pallas_kernels.parts.hopper.products import accumulated, accumulator, one_step, ref_type, start, steps, tile_type
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARPGROUP, i32, thread_of_warpgroup, tiled
from pallas_kernels.parts.hopper.widen import widening

_STEP: Final = 16  # elements of K in one instruction
_GROUP: Final = 8  # rows of a tile of swizzled memory
_CHUNK: Final = 16  # bytes that a swizzle moves together, and of a row of `ldmatrix`
_OF_KEYS: Final = 4  # factors of a thread for each step
_OF_VALUES: Final = 2  # factors of a thread for each 64 columns
_PAIRS: Final = (0, 2, 1, 3)  # bytes of two keys, by column


def turn_queries(queries: Any, interpret: bool) -> None:
    """Moves the columns of queries to where `start_keys` takes them; in the interpreter they stay.

    Args:
        queries: Shared memory (8, H) of 16-bit numbers, stored as `tile.tiled` says. The products may read it next.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """
    if interpret:
        return
    inline: Any = plgpu.inline_mgpu(arg_types=(ref_type(queries),))

    @inline  # type: ignore[untyped-decorator]
    def turn(_: Any, ref: Any) -> None:
        # A thread has 16 columns of a row: of their 8 words those with even numbers go to the front.
        _, squares, _, width = ir.MemRefType(ref.type).shape
        word, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
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
            words = [element(chunk, i) for chunk in chunks for i in range(4)]
            for half in range(2):
                found = llvm.mlir_undef(kind)
                for i in range(4):
                    found = llvm.insertelement(found, words[2 * i + half], i32(i))
                llvm.store(found, pointers[half])

    turn(queries)
    plgpu.commit_smem()


def read_key_factors(factors: Any, interpret: bool) -> jax.Array:
    """Returns the factors of keys' columns, (H,) float32 in GPU memory, in registers, for `start_keys`."""
    if interpret:
        read: jax.Array = factors[...]
        return read

    def places(thread: Any) -> list[Any]:
        own = _times(arith.remui(thread, i32(4)), _OF_KEYS)
        return [_sum(own, i32(at)) for at in range(0, factors.shape[0], _STEP)]

    return _read(factors, places, _OF_KEYS, factors.shape[0] // _STEP)


def read_value_factors(factors: Any, interpret: bool) -> jax.Array:
    """Returns the factors of values' columns, (V,) float32 in GPU memory, in registers, for `start_values`."""
    if interpret:
        read: jax.Array = factors[...]
        return read

    def places(thread: Any) -> list[Any]:
        lane, warp = arith.remui(thread, i32(32)), arith.divui(thread, i32(32))
        own = _sum(_times(warp, 16), _times(arith.divui(lane, i32(4)), _OF_VALUES))
        return [_sum(own, i32(at)) for at in range(0, factors.shape[0], ROWS)]

    return _read(factors, places, _OF_VALUES, factors.shape[0] // ROWS)


def _read(factors: Any, places: Any, count: int, registers: int) -> jax.Array:
    shape = (WARPGROUP * count * registers,)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=count)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)

    @inline  # type: ignore[untyped-decorator]
    def load(_: Any, factors: Any) -> Any:
        f32, found = ir.F32Type.get(), np.empty((registers,), dtype=object)
        base = mgpu.utils.memref_ptr(factors)
        for i, place in enumerate(places(thread_of_warpgroup())):
            found[i] = llvm.load(ir.VectorType.get((count,), f32), mgpu.utils.getelementptr(base, [place], f32))
        return mgpu.FragmentedArray(_registers=found, _layout=mgpu.WGStridedFragLayout(shape, count), _is_signed=None)

    loaded: jax.Array = load(factors)
    return loaded


def start_keys(stored: Any, queries: Any, factors: jax.Array, fp8: bool, interpret: bool) -> Tile:
    """Starts keys @ queries^T: keys are bytes times factors in float32, rounded to the dtype of the queries.

    All bytes of the keys have been read when `products.finish` is done and the threads have met.

    Args:
        stored: Shared memory (128, H) int8, stored as `tile.tiled` says.
        queries: Shared memory (8, H), from `turn_queries`.
        factors: From `read_key_factors`.
        fp8: Whether bytes are float8_e4m3fn; else they are integers.
        interpret: Whether Mosaic's interpreter runs the kernel.

    Returns:
        (128, 8) float32, not to be touched before `products.finish`.
    """
    rows, columns = stored.shape
    if interpret:
        keys = _widened(stored, factors, queries.dtype, fp8)
        low, high = (start(None, (keys[at : at + ROWS],), (queries,), interpret=True) for at in range(0, rows, ROWS))
        return low, high
    types = (plgpu.RefType(tiled(jnp.int8, columns)), ref_type(queries), _strided(factors, _OF_KEYS))
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=(tile_type(COLUMNS),) * 2)

    @inline  # type: ignore[untyped-decorator]
    def issue(_: Any, stored: Any, queries: Any, factors: Any) -> Any:
        kind = ir.MemRefType(queries.type).element_type
        own = _elements(factors, _OF_KEYS)
        text = widening(fp8, str(kind))
        at = _Place(stored)
        # Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of a warp at one step, 2 and 3 those at the next.
        group = _sum(_times(at.warp, 2), arith.andi(at.matrix, i32(1)))
        base, turn = at.row(group), arith.xori(arith.shrui(at.matrix, i32(1)), at.swizzle)
        places = [_sum(base, _times(arith.xori(turn, i32(step)), _CHUNK)) for step in range(0, columns // _STEP, 2)]
        found = []
        for tile in range(rows // ROWS):
            read = [_load(_sum(place, i32(tile * ROWS * columns)), turned=False) for place in places]
            words = [[pair[0], pair[1]] for four in read for pair in (four[:2], four[2:])]
            operands = []
            for step, pair in enumerate(words):
                low, high = (_widen(text, word, own[step]) for word in pair)
                operands.append([low[0], high[0], low[1], high[1]])
            found.append(_multiply(None, operands, queries, kind))
        return tuple(found)

    low, high = issue(stored, queries, factors)
    return low, high


def start_values(
    totals: tuple[jax.Array, ...],
    stored: Any,
    weights: Any,
    factors: jax.Array,
    cleaned: Any,
    fp8: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Starts totals + values^T @ weights^T, values being made of bytes as `start_keys` makes keys.

    Args:
        totals: (64, 8) float32 for each 64 columns of the values; rows in the interpreter are columns in their order.
        stored: Shared memory (128, V) int8, stored as `tile.tiled` says.
        weights: Shared memory (8, 128) of 16-bit numbers.
        factors: From `read_value_factors`.
        cleaned: Whether factors that are not finite count as zeros, bool.
        fp8: Whether bytes are float8_e4m3fn; else they are integers.
        interpret: Whether Mosaic's interpreter runs the kernel.

    Returns:
        Tiles as `totals`, not to be touched before `products.finish`.
    """
    rows, columns = stored.shape
    if interpret:
        factors = jnp.where(cleaned & ~jnp.isfinite(factors), 0, factors)
        values = _widened(stored, factors, weights.dtype, fp8)
        return tuple(
            start(total, (values[:, i * ROWS : (i + 1) * ROWS],), (weights,), left_along=False, interpret=True)
            for i, total in enumerate(totals)
        )
    layouts = (_strided(factors, _OF_VALUES), plgpu.Layout.WG_SPLAT(()))
    types = (plgpu.RefType(tiled(jnp.int8, columns)), ref_type(weights), *layouts, *[TILE] * len(totals))
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=(tile_type(COLUMNS),) * len(totals))

    @inline  # type: ignore[untyped-decorator]
    def issue(_: Any, stored: Any, weights: Any, factors: Any, cleaned: Any, *totals: Any) -> Any:
        kind = ir.MemRefType(weights.type).element_type
        flag = cleaned.registers.item()
        own = [[_finite(x, flag) for x in pair] for pair in _elements(factors, _OF_VALUES)]
        text = widening(fp8, str(kind), _PAIRS)
        at = _Place(stored)
        # A matrix has 8 keys; a warp has 16 columns of every 64.
        base, turn = at.row(at.matrix), arith.xori(at.warp, at.swizzle)
        found = []
        for tile, total in enumerate(totals):
            chunk = arith.xori(turn, i32(tile * ROWS // _CHUNK))
            place = _sum(base, _times(chunk, _CHUNK))
            read = [_load(_sum(place, i32(key * columns)), turned=True) for key in range(0, rows, 2 * _STEP)]
            first, second = own[tile]
            operands = []
            for four in read:
                for pair in (four[:2], four[2:]):
                    low, high = (_widen(text, word, [first, first, second, second]) for word in pair)
                    operands.append([*low, *high])
            found.append(_multiply(total, operands, weights, kind))
        return tuple(found)

    started: tuple[jax.Array, ...] = issue(stored, weights, factors, jnp.asarray(cleaned, jnp.int32), *totals)
    return started


class _Place:
    """Where a thread's row of `ldmatrix` lies in a tile of bytes.

    Attributes:
        warp: Number of the warp in its warpgroup.
        matrix: Number of the 8 by 8 matrix of which this thread gives a row.
        swizzle: What is added to the number of a chunk, without carry.
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
    """Issues a product of words in registers, four for each step, and a group of products of its own."""
    sums = [] if total is None else accumulated(mgpu.optimization_barrier(total))
    nvvm.wgmma_fence_aligned()
    for row, (column,) in zip(operands, steps((right,), True), strict=True):
        sums = one_step(sums, COLUMNS // 2, row, column, kind, "0")
    nvvm.wgmma_commit_group_sync_aligned()
    return accumulator(sums, COLUMNS)


def _widen(text: str, word: Any, factors: list[Any]) -> list[Any]:
    # A side effect keeps it in front of the fence of the products.
    kinds = [word.type, word.type]
    return list(mgpu.utils.inline_ptx(text, word, *factors, result_types=kinds, has_side_effects=True))


def _finite(factor: Any, cleaned: Any) -> Any:
    text = (
        "{ .reg .pred p, q; testp.finite.f32 p, $1; setp.eq.s32 q, $2, 0; or.pred p, p, q;"
        " selp.f32 $0, $1, 0f00000000, p; }"
    )
    return mgpu.utils.inline_ptx(text, factor, cleaned, result_types=ir.F32Type.get())


def _load(address: Any, turned: bool) -> list[Any]:
    """Reads four matrices of 8 by 8 pairs of bytes."""
    word = i32(0).type
    found = llvm.inline_asm(
        llvm.StructType.get_literal([word] * 4),
        [address],
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if turned else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(4)]


def _elements(array: Any, count: int) -> list[list[Any]]:
    return [[element(register, i) for i in range(count)] for register in array.registers.flat]


def _strided(array: jax.Array, count: int) -> Any:
    return plgpu.Layout.WG_STRIDED(array.shape, vec_size=count)


def _widened(stored: Any, factors: jax.Array, dtype: Any, fp8: bool) -> jax.Array:
    read = stored[...]
    numbers = lax.bitcast_convert_type(read, jnp.float8_e4m3fn) if fp8 else read
    return (numbers.astype(jnp.float32) * factors[None]).astype(dtype)


def _times(number: Any, factor: int) -> Any:
    return arith.muli(number, i32(factor))


def _sum(first: Any, *others: Any) -> Any:
    for other in others:
        first = arith.addi(first, other)
    return first
