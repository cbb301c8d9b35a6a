"""The kernel of the Hopper matmul with float32 accuracy: three bfloat16 parts of each operand, six products.

The producer copies tiles into shared memory as in `hopper.ring`. The weights stay float32 in memory: every
computing warpgroup reads a (64, 64) tile into registers, splits it there and multiplies (wgmma takes its rows from
registers). The activations come split.

A block of 64 elements of K is one accumulator that starts at zero, smallest products first; its sum is added in
float32, rounded to nearest, to the sum of its shard. So the tensor core's additions, which truncate, reach no further
than a block. Shards are added upwards, here or by the caller: their sums are the same bits in both forms.
"""

import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitContract
from pallas_kernels.ops.matmul.hopper import epilogue as ending
from pallas_kernels.ops.matmul.hopper import ring
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.bf16x6 import SplitSchedule

BLOCK: Final = 64
"""Elements of K in a block: the bfloat16 elements of a swizzled row, which wgmma reads from registers at once."""

LARGEST_BFLOAT16: Final = 3.3895313892515355e38

_PRODUCTS: Final = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # (part of the weights, part of the activations)
_PARTS: Final = 3
_SWIZZLE: Final = ending.SWIZZLE_BYTES // 4


def split(value: Any, to_bfloat16: Any) -> list[Any]:
    """Returns three bfloat16 arrays whose sum is a float32 array.

    The sum is exact for magnitudes from 2**-110 on; below, the last part is a denormal and the error at most 2**-134.
    What is not finite stands in the last part, which meets only the first part of the other operand: no infinity meets
    a rest that is zero or has the other sign.

    Args:
        value: float32.
        to_bfloat16: Rounds float32 to bfloat16, to nearest even, and gives it as (float32, bfloat16).
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
    """Runs the kernel on operands that the copy engine can address in whole tiles.

    Args:
        x: (M, 3 K') or (B, M, 3 K') bfloat16: for each block of 64 elements of K the 64 high parts, the 64 middle parts
            and the 64 low parts; K' is K rounded up to a block. M below 8 or a multiple of 8.
        w: (K, N), or (N, K) with `transpose_w`, float32; the contiguous dimension a multiple of 32, the other of 8. A
            stack where `x` is one; a matrix `x` beside a stack belongs to every entry.
        contract: Length of a shard.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (1, M, N), (1, B, M, N) float32, or the sums of the shards (shards, M, N), (shards, B, M, N) for a schedule in
        parts.
    """
    stack, m, n, s = w.shape[:-2], x.shape[-2], w.shape[-2 if transpose_w else -1], schedule.tiles
    k = w.shape[-1 if transpose_w else -2]
    swizzle = _SWIZZLE if transpose_w else math.gcd(_SWIZZLE, n)
    w_side = ring._Side(n, k, transpose_w, s.block_n, s.block_n, swizzle, BLOCK)
    x_rows = s.block_m if m > s.block_m else min(s.block_m, -(-m // 8) * 8)
    x_side = ring._Side(m, x.shape[-1], True, s.block_m, x_rows, BLOCK, _PARTS * BLOCK)
    row_tiles, column_tiles = -(-n // s.block_n), -(-m // s.block_m)
    steps, shards = contract.shard // BLOCK, contract.shards(k)
    parts, in_block = (shards, 1) if schedule.parted else (1, shards)
    tiles = math.prod(stack) * parts * row_tiles * column_tiles
    blocks = min(tiles, s.clusters) if s.clusters else tiles
    unit_steps = steps * in_block
    stages = min(s.stages, unit_steps * -(-tiles // blocks))
    store = ending.make_store(s, (64, s.tile_columns), m, n, jnp.dtype(jnp.float32), ending.Epilogue())
    alias = store.ragged and not interpret
    from_registers = not interpret  # the interpreter multiplies what is in shared memory only

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any, w_smem: Any, x_smem: Any, out_smem: Any, *refs: Any) -> None:
        out_tiled, out_plain = out_smem if alias else (out_smem, None)
        split_smem = None if from_registers else refs[0]
        full, empty = refs[-2:]
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(tiles - first + blocks - 1, blocks)

        def origin(tile: Any) -> tuple[Any, Any, Any, Any]:
            """Part of K, place in the stack, first row and first column of this block's tile."""
            index = first + tile * blocks
            part = lax.div(index, tiles // parts)
            index = lax.rem(index, tiles // parts)
            place = lax.div(index, row_tiles * column_tiles) if stack else None
            index = lax.rem(index, row_tiles * column_tiles)
            row, column = ring._tile_position(index, row_tiles, column_tiles, s.group)
            return part, place, row * s.block_n, column * s.block_m

        def produce() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(ring._PRODUCER_REGISTERS, action="decrease")

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                part, place, row, column = origin(tile)

                @pl.loop(0, unit_steps)
                def _(step: Any) -> None:
                    position = tile * unit_steps + step
                    slot, block = lax.rem(position, stages), part * unit_steps + step

                    @pl.when(position >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    w_source, x_source = ending.in_stack(w_ref, place), ending.in_stack(x_ref, place)
                    w_side.copy([w_source], w_smem, row, block * BLOCK, slot, full.at[slot], None)
                    x_side.copy([x_source], x_smem, column, block * (_PARTS * BLOCK), slot, full.at[slot], None)

            total = count * unit_steps

            @pl.loop(0, jnp.minimum(total, stages))
            def _(i: Any) -> None:  # every signal is awaited
                plgpu.barrier_wait(empty.at[lax.rem(jnp.maximum(total - stages, 0) + i, stages)])

        def consume() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(ring._COMPUTE_REGISTERS[s.warpgroups], action="increase")
            row_part = pl.ds(warpgroup * 64, 64) if s.warpgroups > 1 else slice(None)

            def add_block(position: Any, total: Any) -> Any:
                slot = lax.rem(position, stages)
                plgpu.barrier_wait(full.at[slot])
                weights = w_side.operand(w_smem, slot, 0, 0, 1, row_part)
                layout = plgpu.Layout.WGMMA if transpose_w else plgpu.Layout.WGMMA_TRANSPOSED
                value = plgpu.layout_cast(plgpu.load(weights, layout=layout), plgpu.Layout.WGMMA)
                operands = split(value, _round)
                if split_smem is not None:
                    for i, operand in enumerate(operands):
                        split_smem.at[warpgroup, i][...] = operand
                    plgpu.commit_smem()
                    operands = [split_smem.at[warpgroup, i] for i in range(_PARTS)]

                def multiply(accumulator: Any) -> Any:
                    for i, j in _PRODUCTS:
                        columns = x_side.operand(x_smem, slot, 0, j, _PARTS, slice(None))
                        plgpu.wgmma(accumulator, operands[i], columns.transpose((1, 0)))
                    return accumulator[...]

                block = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((64, s.tile_columns), jnp.float32))
                plgpu.barrier_arrive(empty.at[slot])
                return total + block

            def zeros() -> Any:
                return plgpu.layout_cast(jnp.zeros((64, s.tile_columns), jnp.float32), plgpu.Layout.WGMMA)

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                part, place, row, column = origin(tile)
                start = tile * unit_steps

                def add_shard(shard: Any, total: Any) -> Any:
                    begin = start + shard * steps
                    return total + lax.fori_loop(0, steps, lambda i, t: add_block(begin + i, t), zeros())

                if in_block == 1:
                    result = lax.fori_loop(0, steps, lambda i, t: add_block(start + i, t), zeros())
                else:
                    result = lax.fori_loop(0, in_block, add_shard, zeros())
                plain = None if out_plain is None else out_plain.at[warpgroup]
                end = ending.Ending(ending.Epilogue(), store, True, out_ref.at[part], out_tiled.at[warpgroup], plain)
                end.finish((result,), place, row + warpgroup * 64, column)

            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == s.warpgroups)(produce)
        pl.when(warpgroup < s.warpgroups)(consume)

    split_scratch = plgpu.SMEM(
        (s.warpgroups, _PARTS, 64, BLOCK), jnp.bfloat16, transforms=ending.tile_transforms(BLOCK, jnp.bfloat16)
    )
    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((parts, *stack, m, n), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            w_side.scratch(stages, jnp.float32, False),
            x_side.scratch(stages, jnp.bfloat16, False),
            store.scratch(s.warpgroups, jnp.float32, alias),
            *([] if from_registers else [split_scratch]),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    result: jax.Array = launch(x, w)
    return result


def _round(value: Any) -> tuple[Any, Any]:
    part = value.astype(jnp.bfloat16)
    return part.astype(jnp.float32), part
