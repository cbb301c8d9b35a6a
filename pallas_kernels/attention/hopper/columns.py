"""Tiles of 128 rows and 8 columns, and numbers per column.

Such a tile is two 64 x 8 wgmma results, rows 0 to 63 and 64 to 127: transposed, a tile that needs only a few of its 64
rows takes 8 registers. A reduction over rows crosses the warps.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, number_of, with_element
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARPGROUP, i32, thread_of_warpgroup, tiled

COLUMNS: Final = 8
"""Columns of a tile."""

COLUMN: Final = TILE.reduce(0)
"""Layout of a number for each column."""

CHAINS: Final = 4
"""Chains of `add_to_lanes` to a lane that `add_rows_to_lanes` knows."""

_GROUP: Final = 8  # rows of one memory tile
_GROUP_WORDS: Final = 80  # floats from one group to the next in `wide`, of which 64 are used: no two lanes share a bank
_THREADS: Final = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)

Tile = tuple[jax.Array, jax.Array]
"""Rows 0 to 63 and 64 to 127, (64, 8) each."""


def scratch(dtype: Any) -> tuple[Any, Any, Any]:
    """Returns the shared memory of a warpgroup.

    Args:
        dtype: Dtype of tiles that are multiplied.

    Returns:
        Two buffers of transposed tiles (8, 128) of `dtype`, a float32 tile, and float32 numbers of four warps, twice.
    """
    return (
        plgpu.SMEM((2, COLUMNS, 2 * ROWS), dtype, transforms=tiled(dtype, 2 * ROWS)),
        plgpu.SMEM((2 * ROWS // _GROUP * _GROUP_WORDS,), jnp.float32),
        plgpu.SMEM((2, 4 * COLUMNS), jnp.float32),
    )


def filled_columns(value: float) -> jax.Array:
    """Returns a float32 number for each column."""
    return plgpu.layout_cast(jnp.full((COLUMNS,), value, jnp.float32), COLUMN)


def down(x: jax.Array, rows: int = ROWS) -> jax.Array:
    """Returns a number per column, broadcast to the rows of a tile."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def largest(tile: Tile, numbers: Any, interpret: bool) -> jax.Array:
    """Returns the largest number of each column, (8,) float32.

    Args:
        tile: float32.
        numbers: Shared memory (32,) float32, no longer read by any thread.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        return jnp.concatenate(tile).max(axis=0)
    result = held((COLUMNS,), COLUMN)

    @inline(TILE, TILE, plgpu.RefType(), COLUMN, result=result)
    def find(low: Any, high: Any, numbers: Any, like: Any) -> Any:
        pairs = [*low.registers.flat, *high.registers.flat]
        own = []
        for i in range(2):
            found = [element(pair, i) for pair in pairs]
            own.append(arith.maximumf(arith.maximumf(found[0], found[1]), arith.maximumf(found[2], found[3])))
        thread = thread_of_warpgroup()
        second = _bit(thread, 16)
        kept, sent = arith.select(second, own[1], own[0]), arith.select(second, own[0], own[1])
        number = arith.maximumf(kept, mgpu.utils.shfl_bfly(sent, 16))
        for distance in (4, 8):
            number = arith.maximumf(number, mgpu.utils.shfl_bfly(number, distance))
        warps = _exchange(numbers, number, thread)
        pair = warps[0]
        for other in warps[1:]:
            pair = arith.maximumf(pair, other)
        return _of_columns(like, pair)

    return find(*tile, numbers, filled_columns(0))


def share_transposed(weights: Tile, narrow: Any, wide: Any, interpret: bool) -> None:
    """Writes a tile to shared memory: transposed and rounded for wgmma, and unchanged for `add_rows_to_lanes`.

    Ends with a barrier of the warpgroup.

    Args:
        weights: float32.
        narrow: Shared memory (8, 128) bfloat16 or float16, as `scratch` says, no longer read by any thread.
        wide: Shared memory, float32, the same.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rounded = tuple(x.astype(narrow.dtype) for x in weights)
    if interpret:
        narrow[...] = jnp.concatenate(rounded).T
        wide[...] = jnp.pad(jnp.concatenate(weights).reshape(-1), (0, wide.shape[0] - 2 * ROWS * COLUMNS))
        plgpu.commit_smem()
        return

    @inline(TILE, TILE, TILE, TILE, plgpu.RefType(tiled(narrow.dtype, 2 * ROWS)), plgpu.RefType())
    def write(low: Any, high: Any, low_rounded: Any, high_rounded: Any, narrow: Any, wide: Any) -> None:
        word, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = thread_of_warpgroup()
        lane, warp = arith.remui(thread, i32(32)), arith.divui(thread, i32(32))
        words = [
            element(vector.bitcast(ir.VectorType.get((1,), word), register), 0)
            for x in (low_rounded, high_rounded)
            for register in x.registers.flat
        ]
        # Lane i provides the address of the transposed row i % 8 of matrix i / 8: two halves of a warp's rows, twice.
        row, matrix = arith.remui(lane, i32(8)), arith.divui(lane, i32(8))
        half, square = arith.remui(matrix, i32(2)), arith.divui(matrix, i32(2))
        chunk = arith.xori(arith.addi(arith.muli(warp, i32(2)), half), row)
        place = arith.addi(arith.muli(square, i32(1024)), arith.addi(arith.muli(row, i32(128)), _times(chunk, 16)))
        address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(narrow), [place], byte)
        shape, kind = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"), nvvm.LdStMatrixEltType.B16
        nvvm.stmatrix(address, words, nvvm.MMALayout.col, shape, kind)
        in_group = arith.addi(_times(arith.divui(lane, i32(4)), COLUMNS), _times(arith.remui(lane, i32(4)), 2))
        first = arith.addi(_times(warp, 2 * _GROUP_WORDS), in_group)
        for at, pair in enumerate([*low.registers.flat, *high.registers.flat]):
            group = at % 2 + at // 2 * (ROWS // _GROUP)
            index = arith.index_cast(ir.IndexType.get(), arith.addi(first, i32(group * _GROUP_WORDS)))
            vector.store(pair, wide, [index])
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        mgpu.utils.warpgroup_barrier()

    write(*weights, *rounded, narrow, wide)


def of_lanes(numbers: jax.Array, interpret: bool) -> jax.Array:
    """Returns numbers of columns (8,) in the layout of the totals of `add_rows_to_lanes`."""
    if interpret:
        return numbers
    result = held((WARPGROUP,), _THREADS)

    @inline(COLUMN, result=result)
    def pick(numbers: Any) -> Any:
        own = _pair(numbers)
        second = _bit(thread_of_warpgroup(), 16)
        return _of_threads(arith.select(second, element(own, 1), element(own, 0)))

    return pick(numbers)


def add_rows_to_lanes(total: jax.Array, decay: jax.Array, wide: Any, interpret: bool) -> jax.Array:
    """Returns fma(total, decay, sum over the lane's rows) of a tile that `share_transposed` has written.

    The sums equal `tile.add_to_lanes` with four chains, transposed: lane i has the rows 2 i and
    2 i + 1 of every 8. Warp i is lane i. A thread adds one chain of one column, every 16th row in ascending order, and
    four neighbours form the tree. `add_lanes_of_columns` combines the lanes. The interpreter has no lanes.

    Args:
        total: Running sums, in the layout of `of_lanes`.
        decay: In the same layout.
        wide: Shared memory.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        tile = wide[...][: 2 * ROWS * COLUMNS].reshape(2 * ROWS, COLUMNS)
        plgpu.commit_smem()
        return total * decay + tile.sum(axis=0)
    result = held((WARPGROUP,), _THREADS)

    @inline(_THREADS, _THREADS, plgpu.RefType(), result=result)
    def add(total: Any, decay: Any, wide: Any) -> Any:
        f32, index = ir.F32Type.get(), ir.IndexType.get()
        thread = thread_of_warpgroup()
        lane, warp = arith.remui(thread, i32(32)), arith.divui(thread, i32(32))
        odd, group = (arith.remui(arith.divui(lane, i32(bit)), i32(2)) for bit in (4, 8))
        row = arith.addi(_times(warp, 2), odd)
        first = arith.addi(arith.addi(_times(group, _GROUP_WORDS), _times(row, COLUMNS)), _column(lane))
        numbers = [
            memref.load(wide, [arith.index_cast(index, arith.addi(first, i32(at * 2 * _GROUP_WORDS)))])
            for at in range(2 * ROWS // (2 * _GROUP))
        ]
        number = numbers[0]
        for other in numbers[1:]:
            number = arith.addf(number, other)
        for distance in (4, 8):
            number = arith.addf(number, mgpu.utils.shfl_bfly(number, distance))
        own, factor = (number_of(x.registers.flat[0]) for x in (total, decay))
        return _of_threads(mgpu.utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", own, factor, number, result_types=f32))

    return add(total, decay, wide)


def add_lanes_of_columns(total: jax.Array, numbers: Any, interpret: bool) -> jax.Array:
    """Adds the lanes of `add_rows_to_lanes` as a tree, (0 + 1) + (2 + 3): a number for each column, (8,).

    Args:
        total: The lanes' sums.
        numbers: Shared memory (32,) float32, no longer read by any thread.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        return total
    result = held((COLUMNS,), COLUMN)

    @inline(_THREADS, plgpu.RefType(), COLUMN, result=result)
    def add(total: Any, numbers: Any, like: Any) -> Any:
        warps = _exchange(numbers, number_of(total.registers.flat[0]), thread_of_warpgroup())
        return _of_columns(like, arith.addf(arith.addf(warps[0], warps[1]), arith.addf(warps[2], warps[3])))

    return add(total, numbers, filled_columns(0))


def _exchange(numbers: Any, number: Any, thread: Any) -> list[Any]:
    """Writes each warp's number of each column, and returns the four warps' pairs for this thread's columns.

    Args:
        numbers: Shared memory.
        number: The thread's number, equal in lanes with the same `_column`.
        thread: Index of the thread.
    """
    index, pair = ir.IndexType.get(), ir.VectorType.get((2,), ir.F32Type.get())
    lane, warp = arith.remui(thread, i32(32)), arith.divui(thread, i32(32))
    one = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, i32(12)), i32(0))
    with mgpu.when(one):
        memref.store(number, numbers, [arith.index_cast(index, arith.addi(_times(warp, COLUMNS), _column(lane)))])
    mgpu.utils.warpgroup_barrier()
    first = _times(arith.remui(lane, i32(4)), 2)
    return [
        vector.load(pair, numbers, [arith.index_cast(index, arith.addi(first, i32(other * COLUMNS)))])
        for other in range(4)
    ]


def _column(lane: Any) -> Any:
    """Returns which of its two columns a lane reduces."""
    return arith.addi(_times(arith.remui(lane, i32(4)), 2), arith.divui(lane, i32(16)))


def _bit(thread: Any, bit: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, i32(bit)), i32(0))


def _times(number: Any, factor: int) -> Any:
    return arith.muli(number, i32(factor))


def _pair(numbers: Any) -> Any:
    """Returns a thread's numbers of its two columns."""
    (register,) = numbers.registers.flat
    return register


def _of_columns(like: Any, pair: Any) -> Any:
    registers = like.registers.copy()
    registers.flat[0] = pair
    return fragmented(registers, like.layout)


def _of_threads(number: Any) -> Any:
    registers = np.empty((1,), dtype=object)
    registers[0] = with_element(llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get())), 0, number)
    return fragmented(registers, mgpu.WGStridedFragLayout((WARPGROUP,), 1))
