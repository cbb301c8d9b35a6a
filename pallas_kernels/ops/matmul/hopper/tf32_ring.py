"""The kernel of the Hopper TF32 matmul for weights stored as (K, N), of which nothing is copied in advance.

wgmma reads float32 operands from shared memory only along K. The ring of `hopper.ring` therefore takes (N, K)
weights. Here the weights are wgmma's rows and come from registers, into which every thread reads its elements in any
order; or one or two warpgroups more turn every tile in shared memory, in place, between the producer that copies it
and the warpgroups that multiply it. The accumulator is the same chain over K in steps of 8, so are its bits.
"""

import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.matmul.hopper import epilogue as ending
from pallas_kernels.ops.matmul.hopper import ring
from pallas_kernels.ops.matmul.hopper.turn import turn
from pallas_kernels.ops.matmul.hopper.wgmma_tf32 import load_rows
from pallas_kernels.ops.matmul.hopper.wgmma_tf32 import multiply as multiply_rows
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tf32 import Tf32Schedule

_SWIZZLE: Final = ending.SWIZZLE_BYTES // 4
# By computing and turning warpgroups: registers of a thread that copies, that turns, that computes.
_REGISTERS: Final = {
    (1, 0): (40, 40, 232),
    (2, 0): (40, 40, 232),
    (3, 0): (40, 40, 152),
    (1, 1): (40, 104, 232),
    (1, 2): (40, 80, 232),
    (2, 1): (40, 88, 192),
}


@in_32_bits
def turning_ring_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    schedule: Tf32Schedule,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address.

    Args:
        x: (M, K), or a stack (B, M, K), float32; K a multiple of 8.
        w: (K, N) float32, N a multiple of 32. A stack where `x` is one; a matrix `x` beside a stack belongs to
            every entry.
        bias: (N',) of any float dtype, N' a multiple of the schedule's `block_n` and at least N; added in float32.
        schedule: Tiles and stages, with turning warpgroups or rows from registers.
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`.
    """
    stack, (m, k), n, s, turners = w.shape[:-2], x.shape[-2:], w.shape[-1], schedule.tiles, schedule.turners
    x_rows = s.block_m if m > s.block_m else min(s.block_m, -(-m // 8) * 8)
    x_side = ring._Side(m, k, True, s.block_m, x_rows, _SWIZZLE, s.k_step)
    w_side = ring._Side(n, k, False, s.block_n, s.block_n, _SWIZZLE, s.k_step)
    rows_size, columns_size = (n, m) if s.swap else (m, n)
    row_tiles, column_tiles = -(-rows_size // s.block_rows), -(-columns_size // s.block_columns)
    tiles, k_steps = math.prod(stack) * row_tiles * column_tiles, -(-k // s.k_step)
    blocks = min(tiles, s.clusters) if s.clusters else tiles
    several, several_warpgroups = max(1, turners), s.warpgroups + turners > 1
    stages = min(s.stages, several * -(-k_steps * -(-tiles // blocks) // several))
    epilogue = ending.Epilogue(bias)
    store = ending.make_store(s, (s.tile_rows, s.tile_columns), m, n, jnp.dtype(out_dtype), epilogue)
    alias = [not interpret and ragged for ragged in (x_side.ragged, store.ragged)]
    transforms = ending.tile_transforms(_SWIZZLE, jnp.float32)
    producer_registers, turner_registers, compute_registers = _REGISTERS[s.warpgroups, turners]

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        _, bias_ref, _, (out_ref, w_smem, x_smem, out_smem, *apart, full, ready, empty) = epilogue.take(refs)
        w_tiles, turned = (w_smem, *apart) if apart else (w_smem, None) if schedule.from_registers else w_smem
        x_tiled, x_plain = x_smem if alias[0] else (x_smem, x_smem)
        out_tiled, out_plain = out_smem if alias[1] else (out_smem, None)
        warpgroup, first = lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(tiles - first + blocks - 1, blocks)

        def origin(tile: Any) -> tuple[Any, Any, Any]:
            """Place in the stack, first row and first column of this block's tile."""
            index = first + tile * blocks
            place = lax.div(index, row_tiles * column_tiles) if stack else None
            index = lax.rem(index, row_tiles * column_tiles) if stack else index
            row, column = ring._tile_position(index, row_tiles, column_tiles, s.group)
            return place, row * s.block_rows, column * s.block_columns

        def produce() -> None:
            if several_warpgroups:
                plgpu.set_max_registers(producer_registers, action="decrease")

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)
                w_start, x_start = (row, column) if s.swap else (column, row)

                @pl.loop(0, k_steps)
                def _(step: Any) -> None:
                    position = tile * k_steps + step
                    slot, start = lax.rem(position, stages), step * s.k_step

                    @pl.when(position >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    w_side.copy([ending.in_stack(w_ref, place)], w_tiles, w_start, start, slot, full.at[slot], None)
                    x_side.copy([ending.in_stack(x_ref, place)], x_plain, x_start, start, slot, full.at[slot], None)

            total = count * k_steps

            @pl.loop(0, jnp.minimum(total, stages))
            def _(i: Any) -> None:  # every signal is awaited
                plgpu.barrier_wait(empty.at[lax.rem(jnp.maximum(total - stages, 0) + i, stages)])

        def turn_tiles() -> None:
            plgpu.set_max_registers(turner_registers, action="decrease")
            turner = warpgroup - s.warpgroups

            # Stages are a multiple of the turners, so each of them meets every phase of its own stages.
            @pl.loop(0, lax.div(count * k_steps - turner + turners - 1, turners))
            def _(i: Any) -> None:
                slot = lax.rem(turner + i * turners, stages)
                plgpu.barrier_wait(full.at[slot])
                if interpret:
                    turned.at[slot][...] = w_tiles.at[slot, 0].transpose((1, 0))[...]
                else:
                    turn(w_tiles.at[slot, 0], s.k_step, s.block_n, transforms)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])

        def consume() -> None:
            if several_warpgroups:
                plgpu.set_max_registers(compute_registers, action="increase")
            offset = warpgroup * s.tile_rows
            part = pl.ds(offset, s.tile_rows) if s.warpgroups > 1 else slice(None)
            plain = None if out_plain is None else out_plain.at[warpgroup]
            end = ending.Ending(epilogue, store, s.swap, out_ref, out_tiled.at[warpgroup], plain, bias_ref)

            def from_registers(tile: Any, part: Any) -> Any:
                """Returns the sums of a tile; the rows of a stage are read while the stage before is multiplied."""
                start, shape = tile * k_steps, (64, s.tile_columns)

                def add(step: Any, carry: Any) -> Any:
                    total, rows = carry
                    slot = lax.rem(start + step, stages)
                    next_slot = lax.rem(start + jnp.minimum(step + 1, k_steps - 1), stages)

                    @pl.when(step + 1 < k_steps)
                    def _() -> None:
                        plgpu.barrier_wait(full.at[next_slot])

                    columns = x_tiled.at[slot]
                    if interpret:
                        total += interpreted_product(slot, part)
                    else:
                        total, rows = multiply_rows(
                            total, rows, columns, w_tiles.at[next_slot, 0], s.block_n, transforms
                        )
                    plgpu.barrier_arrive(empty.at[slot])
                    return total, rows

                plgpu.barrier_wait(full.at[lax.rem(start, stages)])
                total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
                rows = jnp.float32(0)
                if not interpret:
                    rows = load_rows(w_tiles.at[lax.rem(start, stages), 0], s.k_step, s.block_n, transforms)
                return lax.fori_loop(0, k_steps, add, (total, rows))[0]

            def interpreted_product(slot: Any, part: Any) -> Any:
                turned.at[slot, part][...] = w_tiles.at[slot, 0, :, part].transpose((1, 0))[...]
                plgpu.commit_smem()
                width = s.k_step // x_side.pieces

                def multiply(accumulator: Any) -> Any:
                    for piece in range(x_side.pieces):
                        left = turned.at[slot, part, pl.ds(piece * width, width)]
                        right = x_side.operand(x_tiled, slot, 0, piece, x_side.pieces, slice(None))
                        plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
                    return accumulator[...]

                return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((64, s.tile_columns), jnp.float32))

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)

                def multiply(accumulator: Any, step: Any) -> None:
                    slot = lax.rem(tile * k_steps + step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_wait(ready.at[slot])
                    width = s.k_step // x_side.pieces
                    for piece in range(x_side.pieces):
                        window = pl.ds(piece * width, width) if x_side.pieces > 1 else slice(None)
                        weights = turned.at[slot, part if s.swap else slice(None), window]
                        rows = x_side.operand(x_tiled, slot, 0, piece, x_side.pieces, slice(None) if s.swap else part)
                        left, right = (weights, rows) if s.swap else (rows, weights)
                        plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

                def release(step: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(tile * k_steps + step, stages)])

                def accumulate(accumulator: Any) -> None:
                    multiply(accumulator, 0)

                    @pl.loop(1, k_steps)
                    def _(step: Any) -> None:
                        multiply(accumulator, step)
                        plgpu.wgmma_wait(x_side.pieces)  # the products of the step before are done, this one's go on
                        release(step - 1)

                    plgpu.wgmma_wait(0)
                    release(k_steps - 1)
                    end.finish((accumulator[...],), place, row + offset, column)

                if not schedule.from_registers:
                    pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((s.tile_rows, s.tile_columns), jnp.float32))
                    return
                end.finish((from_registers(tile, part),), place, row + offset, column)

            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == s.warpgroups + turners)(produce)
        if turners:
            pl.when((warpgroup >= s.warpgroups) & (warpgroup < s.warpgroups + turners))(turn_tiles)
        pl.when(warpgroup < s.warpgroups)(consume)

    w_tiles = w_side.scratch(stages, jnp.float32, False)
    turned = plgpu.SMEM((stages, s.block_n, s.k_step), jnp.float32, transforms=transforms)
    # The interpreter knows no two views of the same bytes, and no rows in registers.
    weights: tuple[Any, ...] = (plgpu.RefUnion(w_tiles, turned),) if turners else (w_tiles,)
    if interpret:
        weights = (w_tiles, turned)
    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*stack, m, n), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=s.warpgroups + turners + 1,
        thread_name="warpgroup",
        scratch_types=[
            weights[0],
            x_side.scratch(stages, jnp.float32, alias[0]),
            store.scratch(s.warpgroups, out_dtype, alias[1]),
            *weights[1:],
            plgpu.Barrier(num_arrivals=1 + x_side.pieces, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    result: jax.Array = launch(x, w, *epilogue.inputs)
    return result
