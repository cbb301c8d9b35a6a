"""The kernel of the Hopper TF32 matmul for (K, N) weights, without a copy in advance.

wgmma reads float32 operands from shared memory only along K, so the pipeline of `hopper.ring` takes (N, K) weights.
Here the weights are wgmma's rows and come from registers, into which every thread reads its elements in any order; or
one or two extra warpgroups transpose every tile in place in shared memory before it is multiplied. The accumulator is
the same chain over K in steps of 8, with the same bits.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.hopper import wgmma_rows, wgmma_tf32
from pallas_kernels.matmul.hopper.epilogue import Epilogue, make_store
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.matmul.hopper.pipeline import Place, Ring, Roles, TileScheduler, here, sum_steps
from pallas_kernels.matmul.hopper.product import Product
from pallas_kernels.matmul.hopper.transpose_narrow import transpose_narrow_tile
from pallas_kernels.matmul.hopper.transpose_tile import transpose_tile
from pallas_kernels.matmul.schedule.hopper.tf32 import Tf32Schedule
from pallas_kernels.parts.in_32_bits import in_32_bits

_SWIZZLE: Final = SWIZZLE_BYTES // 4
_TRANSFORMS: Final = tile_transforms(_SWIZZLE, jnp.float32)


@in_32_bits
def transposing_ring_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    schedule: Tf32Schedule,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that TMA can address.

    Args:
        x: (M, K), or a stack (B, M, K), float32; K a multiple of 8.
        w: (K, N) float32, N a multiple of 32 or of the columns of narrower tiles. A stack if `x` is a stack; a matrix
            `x` is shared by every entry of a stack.
        bias: (N',) of any float dtype, N' a multiple of the schedule's `block_n` and at least N; added in float32.
        schedule: Tiles and stages, with transposing warpgroups or rows from registers.
        out_dtype: Dtype of the result; rounded once from the float32 accumulator.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`.
    """
    stack, (m, k), n, s, transposers = w.shape[:-2], x.shape[-2:], w.shape[-1], schedule.tiles, schedule.transposers
    x_side = Operand(m, k, True, s.block_m, loaded_rows(m, s.block_m), _SWIZZLE, s.k_step)
    w_side = Operand(n, k, False, s.block_n, s.block_n, min(_SWIZZLE, s.block_n), s.k_step)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    scheduler = TileScheduler(stack, rows.tiles, columns.tiles, s.block_rows, s.block_columns, s.group, s.blocks)
    epilogue, shape = Epilogue(bias), (s.tile_rows, s.tile_columns)
    plan = Product(
        name="matmul_tf32",
        schedule=s,
        rows=rows,
        columns=columns,
        scheduler=scheduler,
        # The stages are a multiple of the transposing warpgroups, so each waits on every phase of its stages.
        ring=Ring.of(scheduler, -(-k // s.k_step), s.stages, multiple=max(1, transposers)),
        roles=Roles(s.warpgroups, transposers),
        shape=shape,
        store=make_store(s, shape, m, n, jnp.dtype(out_dtype), epilogue),
        interpret=interpret,
    )
    stages = plan.ring.stages
    copied, apart = plan.stages(w_side, jnp.float32), bool(interpret) or schedule.narrow
    transposed_w = plgpu.SMEM((stages, s.block_n, s.k_step), jnp.float32, transforms=_TRANSFORMS)
    scratch = _Scratch(
        # The interpreter supports neither aliased views nor rows in registers.
        w=plgpu.RefUnion(transposed_w, copied) if transposers and not apart else copied,
        x=plan.stages(x_side, jnp.float32),
        store=plan.blocks(out_dtype),
        full=plgpu.Barrier(num_arrivals=1 + x_side.pieces, num_barriers=stages),
        transposed=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        apart=transposed_w if apart else None,
    )
    return plan.launch(functools.partial(_kernel, plan, schedule.narrow), (*stack, m, n), out_dtype, scratch)(
        x, w, epilogue
    )


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block, as in `product.Scratch`, by operand."""

    w: Any
    x: Any
    store: Any
    full: Any
    transposed: Any
    empty: Any
    apart: Any


def _kernel(plan: Product, narrow: bool, x: Any, w: Any, epilogue: Epilogue, out: Any, scratch: _Scratch) -> None:
    """The body of a block."""
    s, ring, (warpgroup, block) = plan.schedule, plan.ring, here()
    count, transposers = plan.scheduler.count(block), plan.roles.transpose
    x_side, w_side = (plan.columns, plan.rows) if s.swap else (plan.rows, plan.columns)
    # As they are read and as they are copied.
    w_stages, x_stages = (scratch.apart, scratch.w), plan.views(x_side, scratch.x)
    if transposers and not (plan.interpret or narrow):
        w_stages = tuple(scratch.w)

    @pl.when(warpgroup == s.warpgroups + transposers)
    def copy_tiles() -> None:
        plan.roles.limit_registers("copy")

        def copy(place: Place, _: Any, step: Any, slot: Any) -> None:
            k, full = step * s.k_step, scratch.full.at[slot]
            w_start, x_start = (place.row, place.column) if s.swap else (place.column, place.row)
            w_side.copy([in_stack(w, place.entry)], w_stages[1], w_start, k, slot, full)
            x_side.copy([in_stack(x, place.entry)], x_stages[1], x_start, k, slot, full)

        ring.produce(count, scratch.empty, lambda tile: plan.scheduler.place(block, tile), copy)

    if transposers:

        @pl.when((warpgroup >= s.warpgroups) & (warpgroup < s.warpgroups + transposers))
        def transpose_tiles() -> None:
            plan.roles.limit_registers("transpose")
            transposer = warpgroup - s.warpgroups

            @pl.loop(0, lax.div(count * ring.steps - transposer + transposers - 1, transposers))
            def _(i: Any) -> None:
                slot = ring.at(transposer + i * transposers)
                plgpu.barrier_wait(scratch.full.at[slot])
                if plan.interpret:
                    w_stages[0].at[slot][...] = w_stages[1].at[slot, 0].transpose((1, 0))[...]
                elif narrow:
                    transforms = tile_transforms(w_side.swizzle, jnp.float32), _TRANSFORMS
                    transpose_narrow_tile(
                        w_stages[1].at[slot, 0], w_stages[0].at[slot], s.k_step, s.block_n, transforms
                    )
                else:
                    transpose_tile(w_stages[1].at[slot, 0], s.k_step, s.block_n, _TRANSFORMS)
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.transposed.at[slot])

    @pl.when(warpgroup < s.warpgroups)
    def multiply_tiles() -> None:
        plan.roles.limit_registers("multiply")
        offset = plan.offset(warpgroup)
        ending, part = plan.ending(epilogue, out, scratch, warpgroup), plan.part(offset)

        @pl.loop(0, count)
        def _(tile: Any) -> None:
            place = plan.scheduler.place(block, tile)

            def finish(sums: Any) -> None:
                ending.finish((sums,), place.entry, place.row + offset, place.column)

            if not transposers:
                finish(_sum_from_registers(plan, scratch, w_stages, x_stages[0], tile, part))
                return

            def accumulate(accumulator: Any) -> None:
                def multiply(_: int, step: Any) -> None:
                    slot = ring.slot(tile, step)
                    plgpu.barrier_wait(scratch.full.at[slot])
                    plgpu.barrier_wait(scratch.transposed.at[slot])
                    _multiply(plan, accumulator, w_stages[0], x_stages[0], slot, part)

                def release(step: Any) -> None:
                    plgpu.barrier_arrive(scratch.empty.at[ring.slot(tile, step)])

                sum_steps((0, ring.steps), multiply, release, products=x_side.pieces)
                finish(accumulator[...])

            pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(plan.shape, jnp.float32))

        plgpu.wait_smem_to_gmem(0)


def _multiply(plan: Product, accumulator: Any, transposed_w: Any, x: Any, slot: Any, part: Any) -> None:
    """Issues the products of a stage with transposed weights; `part` is this warpgroup's rows."""
    s, side = plan.schedule, plan.columns if plan.schedule.swap else plan.rows
    pieces, width = side.pieces, s.k_step // side.pieces
    for piece in range(pieces):
        window = pl.ds(piece * width, width) if pieces > 1 else slice(None)
        weights = transposed_w.at[slot, part if s.swap else slice(None), window]
        rows = side.read(x, slot, 0, piece, pieces, slice(None) if s.swap else part)
        left, right = (weights, rows) if s.swap else (rows, weights)
        plgpu.wgmma(accumulator, left, right.transpose((1, 0)))


def _sum_from_registers(plan: Product, scratch: _Scratch, w: tuple[Any, Any], x: Any, tile: Any, part: Any) -> Any:
    """Returns the sums of a tile; half of the rows of a stage are read while the half before is multiplied."""
    s, ring = plan.schedule, plan.ring
    start, half = tile * ring.steps, s.k_step // 2

    def load(slot: Any, first: int) -> Any:
        if plan.interpret:
            return jnp.float32(0)
        return wgmma_tf32.load_rows(w[1].at[slot, 0], first, half, s.block_n, _TRANSFORMS)

    def multiply(total: Any, rows: Any, slot: Any, first: int) -> Any:
        if plan.interpret:
            return total if first else total + _interpreted_product(plan, w, x, slot, part)
        return wgmma_rows.multiply(total, rows, x.at[slot], first, s.k_step, _TRANSFORMS)

    def add(step: Any, carry: Any) -> Any:
        total, rows = carry
        slot, next_slot = ring.at(start + step), ring.at(start + jnp.minimum(step + 1, ring.steps - 1))
        total = multiply(total, rows, slot, 0)

        @pl.when(step > 0)  # the products of the previous stage have ended
        def _() -> None:
            plgpu.barrier_arrive(scratch.empty.at[ring.at(start + step - 1)])

        total = multiply(total, load(slot, half), slot, half)

        @pl.when(step + 1 < ring.steps)
        def _() -> None:
            plgpu.barrier_wait(scratch.full.at[next_slot])

        return total, load(next_slot, 0)

    plgpu.barrier_wait(scratch.full.at[ring.at(start)])
    total = plgpu.layout_cast(jnp.zeros((64, s.tile_columns), jnp.float32), plgpu.Layout.WGMMA)
    total, _ = lax.fori_loop(0, ring.steps, add, (total, load(ring.at(start), 0)))
    if not plan.interpret:
        total = wgmma_rows.finish(total)
    plgpu.barrier_arrive(scratch.empty.at[ring.at(start + ring.steps - 1)])
    return total


def _interpreted_product(plan: Product, w: tuple[Any, Any], x: Any, slot: Any, part: Any) -> Any:
    """Returns the product of a stage for the interpreter, which does not support rows in registers."""
    transposed_w, copied = w
    transposed_w.at[slot, part][...] = copied.at[slot, 0, :, part].transpose((1, 0))[...]
    plgpu.commit_smem()

    def multiply(accumulator: Any) -> Any:
        _multiply(plan, accumulator, transposed_w, x, slot, part)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((64, plan.schedule.tile_columns), jnp.float32))
