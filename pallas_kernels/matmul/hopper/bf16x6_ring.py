"""The kernel of the Hopper matmul with float32 accuracy: three bfloat16 limbs of each operand, six products.

The producer copies tiles into shared memory as in `hopper.ring`. The weights stay float32 in memory: every computing
warpgroup reads a (64, 64) tile into registers, splits it there and multiplies (wgmma reads its rows from registers).
The activations are split beforehand.

A block of 64 elements of K is summed in one accumulator that starts at zero, smallest products first; its sum is added
in float32, rounded to nearest, to the sum of its K split. The truncating additions of the tensor core are thus confined
to a block. The splits are added in ascending order, here or by the caller, with the same bits.
"""

import functools
import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitContract
from pallas_kernels.matmul.hopper.epilogue import Epilogue, make_store
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.matmul.hopper.pipeline import Place, Ring, Roles, TileScheduler, here
from pallas_kernels.matmul.hopper.product import Product, Scratch
from pallas_kernels.matmul.schedule.hopper.bf16x6 import SplitSchedule
from pallas_kernels.parts.in_32_bits import in_32_bits

BLOCK: Final = 64
"""Elements of K in a block: the bfloat16 elements of a swizzled row, which wgmma reads from registers at once."""

LARGEST_BFLOAT16: Final = 3.3895313892515355e38

_PRODUCTS: Final = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # (limb of the weights, limb of the activations)
_PARTS: Final = 3
_SWIZZLE: Final = SWIZZLE_BYTES // 4


def split(value: Any, to_bfloat16: Any) -> list[Any]:
    """Returns three bfloat16 arrays whose sum is a float32 array.

    The sum is exact for magnitudes from 2**-110 on; below, the last limb is subnormal and the error at most 2**-134.
    Non-finite values are in the last limb, which is multiplied only by the first limb of the other operand: no infinity
    is multiplied by a remainder that is zero or of the other sign.

    Args:
        value: float32.
        to_bfloat16: Rounds float32 to bfloat16, to nearest even, and returns it as (float32, bfloat16).
    """
    finite = jnp.abs(value) < jnp.inf
    clipped = jnp.clip(
        value, -LARGEST_BFLOAT16, LARGEST_BFLOAT16
    )  # the largest float32 numbers would round to infinity
    high, high_part = to_bfloat16(clipped)
    rest = jnp.where(finite, value - high, 0.0)
    middle, middle_part = to_bfloat16(rest)
    return [high_part, middle_part, jnp.where(finite, rest - middle, value).astype(jnp.bfloat16)]


@in_32_bits
def split_ring_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: SplitContract,
    schedule: SplitSchedule,
    transpose_w: bool,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that TMA can address in whole tiles.

    Args:
        x: (M, 3 K') or (B, M, 3 K') bfloat16: for each block of 64 elements of K the 64 high, the 64 middle and the 64
            low limbs; K' is K rounded up to a block. M below 8 or a multiple of 8.
        w: (K, N), or (N, K) with `transpose_w`, float32; the contiguous dimension a multiple of 32, the other of 8. A
            stack if `x` is a stack; a matrix `x` is shared by every entry of a stack.
        contract: Length of a K split.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (1, M, N), (1, B, M, N) float32, or the sums of the K splits (splits, M, N), (splits, B, M, N) for a parted
        schedule.
    """
    stack, m, n, s = w.shape[:-2], x.shape[-2], w.shape[-2 if transpose_w else -1], schedule.tiles
    k = w.shape[-1 if transpose_w else -2]
    swizzle = _SWIZZLE if transpose_w else math.gcd(_SWIZZLE, n)
    weights = Operand(n, k, transpose_w, s.block_n, s.block_n, swizzle, BLOCK)
    columns = Operand(m, x.shape[-1], True, s.block_m, loaded_rows(m, s.block_m), BLOCK, _PARTS * BLOCK)
    steps, splits = contract.k_split // BLOCK, contract.splits(k)
    parts, in_block = (splits, 1) if schedule.parted else (1, splits)
    scheduler = TileScheduler(stack, weights.tiles, columns.tiles, s.block_n, s.block_m, s.group, s.blocks, parts)
    shape = (64, s.tile_columns)
    plan = Product(
        name="matmul_bf16x6",
        schedule=s,
        rows=weights,
        columns=columns,
        scheduler=scheduler,
        ring=Ring.of(scheduler, steps * in_block, s.stages),
        roles=Roles(s.warpgroups),
        shape=shape,
        store=make_store(s, shape, m, n, jnp.dtype(jnp.float32), Epilogue()),
        interpret=interpret,
    )
    limbs = (s.warpgroups, _PARTS, 64, BLOCK)
    scratch = Scratch(
        rows=plan.stages(weights, jnp.float32),
        columns=plan.stages(columns, jnp.bfloat16),
        store=plan.blocks(jnp.float32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=plan.ring.stages),
        empty=plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=plan.ring.stages),
        # The interpreter multiplies only operands in shared memory.
        apart=plgpu.SMEM(limbs, jnp.bfloat16, transforms=tile_transforms(BLOCK, jnp.bfloat16)) if interpret else None,
    )
    kernel = functools.partial(_kernel, plan, steps, in_block)
    return plan.launch(kernel, (parts, *stack, m, n), jnp.float32, scratch)(x, w)


def _kernel(plan: Product, steps: int, splits: int, x: Any, w: Any, out: Any, scratch: Scratch) -> None:
    """The body of a block, which adds the K splits and their blocks."""
    s, ring, (warpgroup, block) = plan.schedule, plan.ring, here()
    count = plan.scheduler.count(block)

    @pl.when(warpgroup == s.warpgroups)
    def copy_tiles() -> None:
        plan.roles.limit_registers("copy")

        def copy(place: Place, _: Any, step: Any, slot: Any) -> None:
            at, full = place.part * ring.steps + step, scratch.full.at[slot]
            weights, rows = in_stack(w, place.entry), in_stack(x, place.entry)
            plan.rows.copy([weights], scratch.rows, place.row, at * BLOCK, slot, full)
            plan.columns.copy([rows], scratch.columns, place.column, at * (_PARTS * BLOCK), slot, full)

        ring.produce(count, scratch.empty, lambda tile: plan.scheduler.place(block, tile), copy)

    @pl.when(warpgroup < s.warpgroups)
    def multiply_tiles() -> None:
        plan.roles.limit_registers("multiply")
        zeros = functools.partial(jnp.zeros, plan.shape, jnp.float32)

        def add_split(start: Any) -> Any:
            """Sums the blocks of a K split, the first of which has position `start` in the pipeline."""
            return lax.fori_loop(
                0,
                steps,
                lambda i, total: _add_block(plan, scratch, warpgroup, start + i, total),
                plgpu.layout_cast(zeros(), plgpu.Layout.WGMMA),
            )

        @pl.loop(0, count)
        def _(tile: Any) -> None:
            place, start = plan.scheduler.place(block, tile), tile * ring.steps
            if splits == 1:
                total = add_split(start)
            else:
                total = lax.fori_loop(
                    0,
                    splits,
                    lambda k_split, total: total + add_split(start + k_split * steps),
                    plgpu.layout_cast(zeros(), plgpu.Layout.WGMMA),
                )
            ending = plan.ending(Epilogue(), out.at[place.part], scratch, warpgroup)
            ending.finish((total,), place.entry, place.row + plan.offset(warpgroup), place.column)

        plgpu.wait_smem_to_gmem(0)


def _add_block(plan: Product, scratch: Scratch, warpgroup: Any, position: Any, total: Any) -> Any:
    """Adds the six products of a block of K."""
    slot = plan.ring.at(position)
    plgpu.barrier_wait(scratch.full.at[slot])
    weights = plan.rows.read(scratch.rows, slot, 0, 0, 1, plan.part(plan.offset(warpgroup)))
    layout = plgpu.Layout.WGMMA if plan.rows.k_major else plgpu.Layout.WGMMA_TRANSPOSED
    operands = split(plgpu.layout_cast(plgpu.load(weights, layout=layout), plgpu.Layout.WGMMA), _round)
    if scratch.apart is not None:
        for i, operand in enumerate(operands):
            scratch.apart.at[warpgroup, i][...] = operand
        plgpu.commit_smem()
        operands = [scratch.apart.at[warpgroup, i] for i in range(_PARTS)]

    def multiply(accumulator: Any) -> Any:
        for i, j in _PRODUCTS:
            columns = plan.columns.read(scratch.columns, slot, 0, j, _PARTS, slice(None))
            plgpu.wgmma(accumulator, operands[i], columns.transpose((1, 0)))
        return accumulator[...]

    block = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(plan.shape, jnp.float32))
    plgpu.barrier_arrive(scratch.empty.at[slot])
    return total + block


def _round(value: Any) -> tuple[Any, Any]:
    part = value.astype(jnp.bfloat16)
    return part.astype(jnp.float32), part
