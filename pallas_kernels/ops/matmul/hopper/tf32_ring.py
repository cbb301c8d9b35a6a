"""The kernel of the Hopper TF32 matmul for weights stored as (K, N), of which nothing is copied in advance.

wgmma reads float32 operands from shared memory only along K. The ring of `hopper.ring` therefore takes (N, K)
weights. Here the weights are wgmma's rows and come from registers, into which every thread reads its elements in any
order; or one or two warpgroups more turn every tile in shared memory, in place, between the producer that copies it
and the warpgroups that multiply it. The accumulator is the same chain over K in steps of 8, so are its bits.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.matmul.hopper.epilogue import Ending, Epilogue, Store, make_store
from pallas_kernels.ops.matmul.hopper.turn import turn
from pallas_kernels.ops.matmul.hopper.wgmma_tf32 import load_rows
from pallas_kernels.ops.matmul.hopper.wgmma_tf32 import multiply as multiply_rows
from pallas_kernels.parts.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.parts.hopper.pipeline import Place, Ring, Walk, here, launch
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.tf32 import Tf32Schedule

_SWIZZLE: Final = SWIZZLE_BYTES // 4
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
    x_side = Operand(m, k, True, s.block_m, loaded_rows(m, s.block_m), _SWIZZLE, s.k_step)
    w_side = Operand(n, k, False, s.block_n, s.block_n, _SWIZZLE, s.k_step)
    rows, columns = (w_side, x_side) if s.swap else (x_side, w_side)
    walk = Walk(stack, rows.tiles, columns.tiles, s.block_rows, s.block_columns, s.group, s.blocks)
    epilogue = Epilogue(bias)
    store = make_store(s, (s.tile_rows, s.tile_columns), m, n, jnp.dtype(out_dtype), epilogue)
    # Stages are a multiple of the turners, so each of them meets every phase of its own stages.
    ring = Ring.of(walk, -(-k // s.k_step), s.stages, multiple=max(1, turners))
    call = _Call(epilogue, store, schedule, x_side, w_side, walk, ring, interpret)
    run = launch(
        "matmul_tf32",
        call.kernel,
        ((*stack, m, n), out_dtype),
        call.scratch(out_dtype),
        blocks=walk.blocks,
        warpgroups=s.warpgroups + turners + 1,
        interpret=interpret,
    )
    return run(x, w, *epilogue.inputs)


@dataclass(frozen=True)
class _Call:
    """What is fixed about a launch.

    Attributes:
        epilogue: What is done to the sums.
        store: How a tile leaves.
        schedule: Tiles and stages, with turning warpgroups or rows from registers.
        x: The activations.
        w: The weights.
        walk: How blocks walk the tiles.
        ring: The stages.
        interpret: Whether the interpreter runs the kernel.
    """

    epilogue: Epilogue
    store: Store
    schedule: Tf32Schedule
    x: Operand
    w: Operand
    walk: Walk
    ring: Ring
    interpret: Any

    @property
    def alias(self) -> tuple[bool, bool]:
        """Whether the activations and the store need their shared memory as plain rows too."""
        return not self.interpret and self.x.ragged, not self.interpret and self.store.ragged

    @property
    def several(self) -> bool:
        """Whether several warpgroups share the registers beside the one that copies."""
        return self.schedule.tiles.warpgroups + self.schedule.turners > 1

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread that copies, that turns, that computes."""
        return _REGISTERS[self.schedule.tiles.warpgroups, self.schedule.turners]

    @property
    def transforms(self) -> tuple[Any, Any]:
        """How tiles lie in shared memory."""
        return tile_transforms(_SWIZZLE, jnp.float32)

    def scratch(self, out_dtype: Any) -> list[Any]:
        """Returns the shared memory and the barriers of a block."""
        s, stages, turners = self.schedule.tiles, self.ring.stages, self.schedule.turners
        w_tiles = self.w.scratch(stages, jnp.float32, False)
        turned = plgpu.SMEM((stages, s.block_n, s.k_step), jnp.float32, transforms=self.transforms)
        # The interpreter knows no two views of the same bytes, and no rows in registers.
        weights: tuple[Any, ...] = (plgpu.RefUnion(w_tiles, turned),) if turners else (w_tiles,)
        if self.interpret:
            weights = (w_tiles, turned)
        return [
            weights[0],
            self.x.scratch(stages, jnp.float32, self.alias[0]),
            self.store.scratch(s.warpgroups, out_dtype, self.alias[1]),
            *weights[1:],
            plgpu.Barrier(num_arrivals=1 + self.x.pieces, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        ]

    def kernel(self, x: Any, w: Any, *refs: Any) -> None:
        """The body of a block."""
        _, bias, _, (out, w_smem, x_smem, out_smem, *apart, full, ready, empty) = self.epilogue.take(refs)
        w_tiles, turned = (w_smem, *apart) if apart else (w_smem, None) if self.schedule.from_registers else w_smem
        x_views = x_smem if self.alias[0] else (x_smem, x_smem)
        buffers = out_smem if self.alias[1] else (out_smem, None)
        warpgroup, block = here()
        count, computing, turners = self.walk.count(block), self.schedule.tiles.warpgroups, self.schedule.turners
        body = _Body(
            self, x, w, out, bias, w_tiles, turned, x_views, buffers, full, ready, empty, warpgroup, block, count
        )
        pl.when(warpgroup == computing + turners)(body.produce)
        if turners:
            pl.when((warpgroup >= computing) & (warpgroup < computing + turners))(body.turn_tiles)
        pl.when(warpgroup < computing)(body.consume)


@dataclass(frozen=True)
class _Body:
    """A block: what is fixed, and its references.

    Attributes:
        call: What is fixed.
        x: The activations in memory.
        w: The weights in memory.
        out: The result.
        bias: The bias, or None.
        w_tiles: Stages of the weights as they come.
        turned: The same bytes when they are turned (other ones under the interpreter), or None.
        x_views: Stages of the activations, and the same as plain rows if they are copied so.
        buffers: Those of the store, and the same as plain rows or None.
        full: Barriers of the stages that have arrived.
        ready: Barriers of the stages whose weights have been turned.
        empty: Barriers of the stages that have been read.
        warpgroup: This warpgroup.
        block: This block.
        count: Tiles of this block.
    """

    call: _Call
    x: Any
    w: Any
    out: Any
    bias: Any
    w_tiles: Any
    turned: Any
    x_views: tuple[Any, Any]
    buffers: tuple[Any, Any]
    full: Any
    ready: Any
    empty: Any
    warpgroup: Any
    block: Any
    count: Any

    def produce(self) -> None:
        """Copies both operands of all tiles of the block."""
        call, s = self.call, self.call.schedule.tiles
        if call.several:
            plgpu.set_max_registers(call.registers[0], action="decrease")

        def copy(place: Place, tile: Any, step: Any, slot: Any) -> None:
            del tile
            k, full = step * s.k_step, self.full.at[slot]
            w_start, x_start = (place.row, place.column) if s.swap else (place.column, place.row)
            call.w.copy([in_stack(self.w, place.entry)], self.w_tiles, w_start, k, slot, full)
            call.x.copy([in_stack(self.x, place.entry)], self.x_views[1], x_start, k, slot, full)

        call.ring.produce(self.count, self.empty, lambda tile: call.walk.place(self.block, tile), copy)

    def turn_tiles(self) -> None:
        """Turns the weights of every stage in place."""
        call, s, turners = self.call, self.call.schedule.tiles, self.call.schedule.turners
        plgpu.set_max_registers(call.registers[1], action="decrease")
        turner = self.warpgroup - s.warpgroups

        @pl.loop(0, lax.div(self.count * call.ring.steps - turner + turners - 1, turners))
        def _(i: Any) -> None:
            slot = lax.rem(turner + i * turners, call.ring.stages)
            plgpu.barrier_wait(self.full.at[slot])
            if call.interpret:
                self.turned.at[slot][...] = self.w_tiles.at[slot, 0].transpose((1, 0))[...]
            else:
                turn(self.w_tiles.at[slot, 0], s.k_step, s.block_n, call.transforms)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ready.at[slot])

    def consume(self) -> None:
        """Multiplies and stores this warpgroup's part of the tiles of the block."""
        call, s = self.call, self.call.schedule.tiles
        if call.several:
            plgpu.set_max_registers(call.registers[2], action="increase")
        offset = self.warpgroup * s.tile_rows
        part = pl.ds(offset, s.tile_rows) if s.warpgroups > 1 else slice(None)
        tiled, plain = self.buffers
        buffers = tiled.at[self.warpgroup], None if plain is None else plain.at[self.warpgroup]
        end = Ending(call.epilogue, call.store, s.swap, self.out, *buffers, self.bias)

        @pl.loop(0, self.count)
        def _(tile: Any) -> None:
            place = call.walk.place(self.block, tile)
            if call.schedule.from_registers:
                sums = self.sum_from_registers(tile, part)
                end.finish((sums,), place.entry, place.row + offset, place.column)
                return

            def accumulate(accumulator: Any) -> None:
                self.sum_turned(accumulator, tile, part)
                end.finish((accumulator[...],), place.entry, place.row + offset, place.column)

            pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((s.tile_rows, s.tile_columns), jnp.float32))

        plgpu.wait_smem_to_gmem(0)

    def sum_turned(self, accumulator: Any, tile: Any, part: Any) -> None:
        """Sums a tile whose weights are turned in shared memory; `part` of its rows is this warpgroup's."""
        call, s = self.call, self.call.schedule.tiles
        pieces, steps = call.x.pieces, call.ring.steps

        def multiply(step: Any) -> None:
            slot = call.ring.slot(tile, step)
            plgpu.barrier_wait(self.full.at[slot])
            plgpu.barrier_wait(self.ready.at[slot])
            width = s.k_step // pieces
            for piece in range(pieces):
                window = pl.ds(piece * width, width) if pieces > 1 else slice(None)
                weights = self.turned.at[slot, part if s.swap else slice(None), window]
                rows = call.x.read(self.x_views[0], slot, 0, piece, pieces, slice(None) if s.swap else part)
                left, right = (weights, rows) if s.swap else (rows, weights)
                plgpu.wgmma(accumulator, left, right.transpose((1, 0)))

        def release(step: Any) -> None:
            plgpu.barrier_arrive(self.empty.at[call.ring.slot(tile, step)])

        multiply(0)

        @pl.loop(1, steps)
        def _(step: Any) -> None:
            multiply(step)
            plgpu.wgmma_wait(pieces)  # the products of the step before are done, this one's go on
            release(step - 1)

        plgpu.wgmma_wait(0)
        release(steps - 1)

    def sum_from_registers(self, tile: Any, part: Any) -> Any:
        """Returns the sums of a tile; the rows of a stage are read while the stage before is multiplied."""
        call, s = self.call, self.call.schedule.tiles
        steps, stages = call.ring.steps, call.ring.stages
        start, shape = tile * steps, (64, s.tile_columns)

        def add(step: Any, carry: Any) -> Any:
            total, rows = carry
            slot = lax.rem(start + step, stages)
            next_slot = lax.rem(start + jnp.minimum(step + 1, steps - 1), stages)

            @pl.when(step + 1 < steps)
            def _() -> None:
                plgpu.barrier_wait(self.full.at[next_slot])

            columns = self.x_views[0].at[slot]
            if call.interpret:
                total += self.interpreted_product(slot, part)
            else:
                total, rows = multiply_rows(
                    total, rows, columns, self.w_tiles.at[next_slot, 0], s.block_n, call.transforms
                )
            plgpu.barrier_arrive(self.empty.at[slot])
            return total, rows

        plgpu.barrier_wait(self.full.at[lax.rem(start, stages)])
        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        rows = jnp.float32(0)
        if not call.interpret:
            rows = load_rows(self.w_tiles.at[lax.rem(start, stages), 0], s.k_step, s.block_n, call.transforms)
        return lax.fori_loop(0, steps, add, (total, rows))[0]

    def interpreted_product(self, slot: Any, part: Any) -> Any:
        """Returns the product of a stage as the interpreter computes it, which knows no rows in registers."""
        call, s = self.call, self.call.schedule.tiles
        self.turned.at[slot, part][...] = self.w_tiles.at[slot, 0, :, part].transpose((1, 0))[...]
        plgpu.commit_smem()
        width = s.k_step // call.x.pieces

        def multiply(accumulator: Any) -> Any:
            for piece in range(call.x.pieces):
                left = self.turned.at[slot, part, pl.ds(piece * width, width)]
                right = call.x.read(self.x_views[0], slot, 0, piece, call.x.pieces, slice(None))
                plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((64, s.tile_columns), jnp.float32))
