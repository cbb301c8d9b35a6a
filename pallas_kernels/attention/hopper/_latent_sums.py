"""The sums of weights of `MmaAttentionContract` where keys are the rows of tiles: a thread for each of eight columns.

Thread t has the keys 8 i + t % 8 of the row t / 8; `_column_sums` adds the same numbers in the same order.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.attention.hopper._latent_columns import COLUMN, NARROW
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import with_number
from pallas_kernels.parts.hopper.tile import ROWS, TILE, i32, thread_of_warpgroup

COLUMNS: Final = 8
"""Sums of a row."""

_STRIDE: Final = 20  # floats from one key to the next in shared memory: no two lanes share a bank

WIDE: Final = ROWS * _STRIDE
"""Floats of shared memory of a warpgroup."""


def fold_keys(weights: jax.Array, wide: Any, sums: Any, interpret: bool) -> None:
    """Writes the sums of a block of 64 keys: its first half plus its second half, until eight keys are left.

    Args:
        weights: (64, 16) float32.
        wide: Shared memory (`WIDE`,) float32 of the warpgroup.
        sums: Shared memory (128,) float32.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        while weights.shape[0] > COLUMNS:
            half = weights.shape[0] // 2
            weights = weights[:half] + weights[half:]
        sums[...] = weights.T.reshape(-1)
        return

    @inline(TILE, plgpu.RefType(), plgpu.RefType())
    def fold(weights: Any, wide: Any, sums: Any) -> None:
        index, thread = ir.IndexType.get(), thread_of_warpgroup()
        lane = arith.remui(thread, i32(32))
        upper = arith.addi(arith.muli(arith.divui(thread, i32(32)), i32(16)), arith.divui(lane, i32(4)))
        first = arith.addi(arith.muli(upper, i32(_STRIDE)), arith.muli(arith.remui(lane, i32(4)), i32(2)))
        pairs = weights.registers.reshape(NARROW // 8, 2)
        mgpu.utils.warpgroup_barrier()  # the block before was read
        for j in range(NARROW // 8):
            for half in range(2):
                place = arith.addi(first, i32(8 * j + 8 * half * _STRIDE))
                vector.store(pairs[j, half], wide, [arith.index_cast(index, place)])
        mgpu.utils.warpgroup_barrier()
        row, own = arith.divui(thread, i32(COLUMNS)), arith.remui(thread, i32(COLUMNS))
        first = arith.addi(arith.muli(own, i32(_STRIDE)), row)
        places = (arith.addi(first, i32(at * COLUMNS * _STRIDE)) for at in range(ROWS // COLUMNS))
        numbers = [memref.load(wide, [arith.index_cast(index, place)]) for place in places]
        while len(numbers) > 1:
            middle = len(numbers) // 2
            numbers = [arith.addf(a, b) for a, b in zip(numbers[:middle], numbers[middle:], strict=True)]
        memref.store(numbers[0], sums, [arith.index_cast(index, thread)])

    fold(weights, wide, sums)


def add_blocks(sums: Any, decays: Any, numbers: Any, count: Any, interpret: bool) -> jax.Array:
    """Returns the sums of rows over blocks, fma(sums, decay, those of a block) and then the eight columns, (16,).

    Args:
        sums: Shared memory (blocks, 128) float32, from `fold_keys`.
        decays: Shared memory (blocks, 16) float32.
        numbers: Shared memory (16,) float32.
        count: The number of blocks, int32.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    blocks = sums.shape[0]
    if interpret:
        found, factors = sums[...].reshape(blocks, NARROW, COLUMNS), decays[...]
        plgpu.commit_smem()
        total = jnp.zeros((NARROW, COLUMNS), jnp.float32)
        for at in range(blocks):
            total = jnp.where(at < count, total * factors[at][:, None] + found[at], total)
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return total[:, 0]
    number = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), number, COLUMN, result=held((NARROW,), COLUMN))
    def add(sums: Any, decays: Any, numbers: Any, count: Any, like: Any) -> Any:
        index, f32, thread = ir.IndexType.get(), ir.F32Type.get(), thread_of_warpgroup()
        row, (count,) = arith.divui(thread, i32(COLUMNS)), count.registers.flat
        own, of_row = (arith.index_cast(index, x) for x in (thread, row))
        total = mgpu.c(0.0, f32)
        for at in range(blocks):
            block = mgpu.c(at, index)
            found, factor = memref.load(sums, [block, own]), memref.load(decays, [block, of_row])
            more = mgpu.utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", total, factor, found, result_types=f32)
            total = arith.select(arith.cmpi(arith.CmpIPredicate.slt, i32(at), count), more, total)
        for distance in (4, 2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        memref.store(total, numbers, [of_row])
        mgpu.utils.warpgroup_barrier()
        registers = like.registers.copy()
        first = arith.muli(arith.remui(thread, i32(4)), i32(2))
        for j in range(registers.size):
            for i in range(2):
                place = arith.index_cast(index, arith.addi(first, i32(8 * j + i)))
                registers.flat[j] = with_number(registers.flat[j], memref.load(numbers, [place]), i)
        return fragmented(registers, like.layout)

    like = plgpu.layout_cast(jnp.full((NARROW,), 0.0, jnp.float32), COLUMN)
    return add(sums, decays, numbers, jnp.asarray(count, jnp.int32), like)
