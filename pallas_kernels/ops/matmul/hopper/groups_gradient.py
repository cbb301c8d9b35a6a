"""The kernel that sums the outer products of the rows of each group (expert): the gradient of its weights.

One warpgroup copies, the others multiply, as in `hopper.ring`; but the length of a sum is the size of a group, which
only the GPU knows. A sum is one chain over the rows of its group upwards, in steps of 16 from the first one on.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.matmul.hopper.epilogue import Ending, Epilogue, Store, make_store
from pallas_kernels.parts.hopper.groups import Table
from pallas_kernels.parts.hopper.operand import Operand, whole_swizzle
from pallas_kernels.parts.hopper.pipeline import COMPUTE_REGISTERS, PRODUCER_REGISTERS, Walk, here, launch
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
    """Runs the kernel on rows that were moved apart.

    Args:
        x: (M', K), bfloat16 or float16, K a multiple of 16: the rows of a group start at the next multiple of the
            schedule's `k_step`, with zeros between the groups. M' is a multiple of `k_step`.
        g: (M', N) of the same dtype, N a multiple of 16, moved apart in the same way.
        sizes: (G,) int32, the rows of each group.
        rows: How many rows there were. Sizes that are negative or add up to more give nan.
        schedule: Tiles and stages, without `swap`; no tiles in turn.
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
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
    walk = Walk((groups,), rows_side.tiles, columns_side.tiles, s.block_m, s.block_n, s.group, s.blocks or SMS)
    shape = s.tile_rows, s.tile_columns
    store = make_store(s, shape, k, n, jnp.dtype(out_dtype), Epilogue())
    call = _Call(s, rows_side, columns_side, walk, Table(groups, rows, s.k_step), store, shape, interpret)
    run = launch(
        "group_matmul_gradient",
        call.kernel,
        ((groups, k, n), out_dtype),
        call.scratch(x.dtype, out_dtype),
        blocks=walk.blocks,
        warpgroups=s.warpgroups + 1,
        interpret=interpret,
    )
    return run(x, g, sizes)


@dataclass(frozen=True)
class _Call:
    """What is fixed about a launch.

    Attributes:
        schedule: Tiles and stages.
        rows: wgmma's rows, the columns of `x`.
        columns: wgmma's columns, those of `g`.
        walk: How blocks walk the tiles.
        table: Where groups begin; its tiles are the stages of a group.
        store: How a tile leaves.
        shape: Rows and columns of an accumulator.
        interpret: Whether the interpreter runs the kernel.
    """

    schedule: MatmulSchedule
    rows: Operand
    columns: Operand
    walk: Walk
    table: Table
    store: Store
    shape: tuple[int, int]
    interpret: Any

    @property
    def alias(self) -> bool:
        """Whether the store needs its shared memory as plain rows too."""
        return not self.interpret and self.store.ragged

    def scratch(self, dtype: Any, out_dtype: Any) -> list[Any]:
        """Returns the shared memory and the barriers of a block."""
        s = self.schedule
        return [
            self.rows.scratch(s.stages, dtype, False),
            self.columns.scratch(s.stages, dtype, False),
            self.store.scratch(s.warpgroups, out_dtype, self.alias),
            plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=s.stages),
            self.table.scratch(),
            plgpu.Barrier(),
        ]

    def kernel(self, x: Any, g: Any, sizes: Any, out: Any, *scratch: Any) -> None:
        """The body of a block."""
        rows, columns, buffers, full, empty, table, ready = scratch
        warpgroup, block = here()

        @pl.when(warpgroup == 0)
        def _() -> None:
            self.table.fill(sizes, table, self.interpret)
            plgpu.barrier_arrive(ready)

        plgpu.barrier_wait(ready)
        views = buffers if self.alias else (buffers, None)
        body = _Body(self, x, g, out, rows, columns, views, full, empty, table, warpgroup, block)
        pl.when(warpgroup == self.schedule.warpgroups)(body.produce)
        pl.when(warpgroup < self.schedule.warpgroups)(body.consume)


@dataclass(frozen=True)
class _Body:
    """A block: what is fixed, and its references.

    Attributes:
        call: What is fixed.
        x: The rows in memory.
        g: Their cotangents in memory.
        out: The result.
        rows: Stages of `x`.
        columns: Stages of `g`.
        buffers: Those of the store, and the same as plain rows or None.
        full: Barriers of the stages that have arrived.
        empty: Barriers of the stages that have been read.
        table: Where groups begin.
        warpgroup: This warpgroup.
        block: This block.
    """

    call: _Call
    x: Any
    g: Any
    out: Any
    rows: Any
    columns: Any
    buffers: tuple[Any, Any]
    full: Any
    empty: Any
    table: Any
    warpgroup: Any
    block: Any

    @property
    def count(self) -> Any:
        """Tiles of this block."""
        return self.call.walk.count(self.block)

    def slot(self, position: Any) -> Any:
        """The stage of a position; positions count the stages of all tiles of the block."""
        return lax.rem(position, self.call.schedule.stages)

    def steps(self, group: Any) -> Any:
        """Returns the first stage of a group among those of all groups, and how many it has."""
        return self.call.table.span(self.table, 1, group)

    def produce(self) -> None:
        """Copies the rows of all tiles of the block."""
        call, s = self.call, self.call.schedule
        if s.warpgroups > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @pl.loop(0, self.count, init_carry=jnp.int32(0))
        def total(tile: Any, position: Any) -> Any:
            place = call.walk.place(self.block, tile)
            first, steps = self.steps(place.entry)

            @pl.loop(0, steps)
            def _(step: Any) -> None:
                slot = self.slot(position + step)

                @pl.when(position + step >= s.stages)
                def _() -> None:
                    plgpu.barrier_wait(self.empty.at[slot])

                k = (first + step) * s.k_step
                call.rows.copy([self.x], self.rows, place.row, k, slot, self.full.at[slot])
                call.columns.copy([self.g], self.columns, place.column, k, slot, self.full.at[slot])

            return position + steps

        @pl.loop(0, jnp.minimum(total, s.stages))
        def _(i: Any) -> None:  # every signal is awaited
            plgpu.barrier_wait(self.empty.at[self.slot(jnp.maximum(total - s.stages, 0) + i)])

    def consume(self) -> None:
        """Multiplies and stores this warpgroup's part of the tiles of the block."""
        call, s = self.call, self.call.schedule
        if s.warpgroups > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS[s.warpgroups], action="increase")
        offset = self.warpgroup * call.shape[0]
        tiled, plain = (None if view is None else view.at[self.warpgroup] for view in self.buffers)
        ending = Ending(Epilogue(), call.store, False, self.out, tiled, plain, interpret=call.interpret)
        part = pl.ds(offset, call.shape[0]) if s.warpgroups > 1 else slice(None)

        @pl.loop(0, self.count, init_carry=jnp.int32(0))
        def _(tile: Any, position: Any) -> Any:
            _, group, row, column, _ = call.walk.place(self.block, tile)
            _, steps = self.steps(group)
            sums = pl.run_scoped(
                lambda accumulator: self.chain(accumulator, position, steps, part),
                plgpu.WGMMAAccumulatorRef(call.shape, jnp.float32),
            )
            # Sizes that do not fit leave no rows in any group.
            sums = sums + jnp.where(call.table.fit(self.table), jnp.float32(0), jnp.float32(jnp.nan))
            ending.finish((sums,), group, row + offset, column)
            return position + steps

        plgpu.wait_smem_to_gmem(0)

    def chain(self, accumulator: Any, position: Any, steps: Any, part: Any) -> Any:
        """Returns the sum of a tile, whose stages start at a position."""
        call = self.call

        @pl.loop(0, steps)
        def _(step: Any) -> None:
            slot = self.slot(position + step)
            plgpu.barrier_wait(self.full.at[slot])
            left = call.rows.read(self.rows, slot, 0, 0, 1, part)
            right = call.columns.read(self.columns, slot, 0, 0, 1, slice(None))
            plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the products of the step before are done, this one's go on

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(self.empty.at[self.slot(position + step - 1)])

        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _() -> None:
            plgpu.barrier_arrive(self.empty.at[self.slot(position + steps - 1)])

        return accumulator[...]
