"""The kernel that sums the outer products of the rows of each group (expert): the gradient of its weights.

One warpgroup copies, the others multiply, as in `hopper.ring`, but the length of a sum is the size of a group, which
only the GPU knows. A sum is one chain over the rows of its group in ascending order, in steps of 16 from the first.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.matmul.hopper.epilogue import Epilogue, make_store
from pallas_kernels.matmul.hopper.group_tiles import Table
from pallas_kernels.matmul.hopper.operand import Operand, whole_swizzle
from pallas_kernels.matmul.hopper.pipeline import Ring, Roles, TileScheduler, here
from pallas_kernels.matmul.hopper.product import Product, Scratch, fill_table
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tiles import SMS, MatmulSchedule


@in_32_bits
def sum_groups(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    *,
    rows: int,
    schedule: MatmulSchedule,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on padded groups of rows.

    Args:
        x: (M', K), bfloat16 or float16, K a multiple of 16: the rows of a group start at the next multiple of the
            schedule's `k_step`, with zeros between the groups. M' is a multiple of `k_step`.
        g: (M', N) of the same dtype, N a multiple of 16, padded in the same way.
        sizes: (G,) int32, the number of rows of each group.
        rows: Number of rows before padding. Sizes that are negative or add up to more give nan.
        schedule: Tiles and stages, without `swap` or split "tiles".
        out_dtype: Dtype of the result; rounded once from the float32 accumulator.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (G, K, N) of `out_dtype`.
    """
    (m, k), n, groups, s = x.shape, g.shape[1], sizes.shape[0], schedule
    # wgmma reads both operands with one swizzle.
    swizzle = whole_swizzle(x.dtype, k, s.block_m, n, s.block_n)
    rows_side, columns_side = (
        Operand(size, m, False, tile, tile, swizzle, s.k_step) for size, tile in ((k, s.block_m), (n, s.block_n))
    )
    shape = s.tile_rows, s.tile_columns
    plan = Product(
        name="group_matmul_gradient",
        schedule=s,
        rows=rows_side,
        columns=columns_side,
        scheduler=TileScheduler(
            (groups,), rows_side.tiles, columns_side.tiles, s.block_m, s.block_n, s.group, s.blocks or SMS
        ),
        ring=Ring(s.stages),
        roles=Roles(s.warpgroups),
        shape=shape,
        store=make_store(s, shape, k, n, jnp.dtype(out_dtype), Epilogue()),
        interpret=interpret,
    )
    table = Table(groups, rows, s.k_step)
    scratch = Scratch(
        rows=plan.stages(rows_side, x.dtype),
        columns=plan.stages(columns_side, x.dtype),
        store=plan.blocks(out_dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
        empty=plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=s.stages),
        table=table.scratch(),
        ready=plgpu.Barrier(),
    )
    kernel = functools.partial(_kernel, plan, table)
    return plan.launch(kernel, (groups, k, n), out_dtype, scratch)(x, g, sizes)


def _kernel(plan: Product, table: Table, x: Any, g: Any, sizes: Any, out: Any, scratch: Scratch) -> None:
    """The body of a block; the tiles of `table` are the stages of a group."""
    s, ring, (warpgroup, block) = plan.schedule, plan.ring, here()
    fill_table(table, sizes, scratch, warpgroup, plan.interpret)

    @pl.when(warpgroup == s.warpgroups)
    def copy_tiles() -> None:
        plan.roles.limit_registers("copy")

        @pl.loop(0, plan.scheduler.count(block), init_carry=jnp.int32(0))
        def total(tile: Any, position: Any) -> Any:
            place = plan.scheduler.place(block, tile)
            first, steps = table.span(scratch.table, 1, place.entry)

            @pl.loop(0, steps)
            def _(step: Any) -> None:
                def copy(slot: Any) -> None:
                    k, full = (first + step) * s.k_step, scratch.full.at[slot]
                    plan.rows.copy([x], scratch.rows, place.row, k, slot, full)
                    plan.columns.copy([g], scratch.columns, place.column, k, slot, full)

                ring.fill(position + step, scratch.empty, copy)

            return position + steps

        ring.drain(total, scratch.empty)

    @pl.when(warpgroup < s.warpgroups)
    def multiply_tiles() -> None:
        plan.roles.limit_registers("multiply")
        offset = plan.offset(warpgroup)
        part, ending = plan.part(offset), plan.ending(Epilogue(), out, scratch, warpgroup)

        @pl.loop(0, plan.scheduler.count(block), init_carry=jnp.int32(0))
        def _(tile: Any, position: Any) -> Any:
            _, group, row, column, _ = plan.scheduler.place(block, tile)
            _, steps = table.span(scratch.table, 1, group)
            sums = pl.run_scoped(
                lambda accumulator: _sum(plan, scratch, accumulator, position, steps, part),
                plgpu.WGMMAAccumulatorRef(plan.shape, jnp.float32),
            )
            # Invalid sizes leave all groups empty.
            sums = sums + jnp.where(table.fit(scratch.table), jnp.float32(0), jnp.float32(jnp.nan))
            ending.finish((sums,), group, row + offset, column)
            return position + steps

        plgpu.wait_smem_to_gmem(0)


def _sum(plan: Product, scratch: Scratch, accumulator: Any, position: Any, steps: Any, part: Any) -> Any:
    """Returns the sum of a tile whose stages start at a position; `part` is this warpgroup's rows."""
    ring = plan.ring

    @pl.loop(0, steps)
    def _(step: Any) -> None:
        slot = ring.at(position + step)
        plgpu.barrier_wait(scratch.full.at[slot])
        left = plan.rows.read(scratch.rows, slot, 0, 0, 1, part)
        right = plan.columns.read(scratch.columns, slot, 0, 0, 1, slice(None))
        plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
        plgpu.wgmma_wait(1)  # the previous step's products are done; this step's continue

        @pl.when(step > 0)
        def _() -> None:
            plgpu.barrier_arrive(scratch.empty.at[ring.at(position + step - 1)])

    plgpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_arrive(scratch.empty.at[ring.at(position + steps - 1)])

    return accumulator[...]
