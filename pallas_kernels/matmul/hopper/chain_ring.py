"""The kernel of the Hopper matmul for few rows, where the chain over K or the shared memory of few blocks is the limit.

A block has 8 to 64 columns of (K, N) weights, which a warpgroup reads into registers as wgmma's rows, half a stage at a
time, while the half before is multiplied. The accumulator is the same chain over K as in `hopper.ring`, with the same
bits.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.hopper import wgmma_rows
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES, Operand, loaded_rows, tile_transforms
from pallas_kernels.matmul.hopper.pipeline import Ring, TileScheduler, here
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.in_32_bits import in_32_bits


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    w: Any
    x: Any
    full: Any
    empty: Any


@in_32_bits
def chain_matmul(
    x: jax.Array, w: jax.Array, *, schedule: ChainSchedule, out_dtype: Any, interpret: Any = False
) -> jax.Array:
    """Runs the kernel on operands that TMA can address."""
    (m, k), n, s, size = x.shape, w.shape[1], schedule, x.dtype.itemsize
    swizzle = SWIZZLE_BYTES // size
    x_side = Operand(m, k, True, s.rows, loaded_rows(m, s.rows), swizzle, s.k_step)
    w_side = Operand(n, k, False, s.columns, s.columns, min(swizzle, s.columns), s.k_step)
    scheduler = TileScheduler((), w_side.tiles, x_side.tiles, s.columns, s.rows, 8, 0)
    ring = Ring.of(scheduler, -(-k // s.k_step), s.stages)
    scratch = _Scratch(
        w=w_side.scratch(ring.stages, x.dtype, False),
        x=x_side.scratch(ring.stages, x.dtype, x_side.ragged),
        full=plgpu.Barrier(num_arrivals=1 + x_side.pieces, num_barriers=ring.stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=ring.stages),
    )
    transforms = tile_transforms(w_side.swizzle, x.dtype), tile_transforms(swizzle, x.dtype)
    half = s.k_step // 2

    def kernel(x: Any, w: Any, out: Any, scratch: _Scratch) -> None:
        warpgroup, block = here()
        place = scheduler.place(block, 0)
        x_read, x_copied = tuple(scratch.x) if x_side.ragged else (scratch.x, scratch.x)

        @pl.when(warpgroup == 1)
        def copy_tiles() -> None:
            def copy(_: Any, __: Any, step: Any, slot: Any) -> None:
                w_side.copy([w], scratch.w, place.row, step * s.k_step, slot, scratch.full.at[slot])
                x_side.copy([x], x_copied, place.column, step * s.k_step, slot, scratch.full.at[slot])

            def start(step: Any, slot: Any) -> None:
                wgmma_rows.copy_rows(w, scratch.w.at[slot, 0], step * s.k_step, place.row, transforms[0])
                x_side.copy([x], x_copied, place.column, step * s.k_step, slot, scratch.full.at[slot])

            if not s.ahead:
                ring.produce(1, scratch.empty, lambda _: None, copy)
                return

            @pl.loop(0, ring.steps)
            def _(step: Any) -> None:
                ring.fill(step, scratch.empty, lambda slot: start(step, slot))

                @pl.when(step >= s.ahead)
                def _() -> None:
                    wgmma_rows.await_copies(s.ahead, scratch.w.at[0, 0], transforms[0])
                    plgpu.barrier_arrive(scratch.full.at[ring.at(step - s.ahead)])

            wgmma_rows.await_copies(0, scratch.w.at[0, 0], transforms[0])
            for step in range(max(0, ring.steps - s.ahead), ring.steps):
                plgpu.barrier_arrive(scratch.full.at[step % ring.stages])
            ring.drain(ring.steps, scratch.empty)

        @pl.when(warpgroup == 0)
        def multiply_tiles() -> None:
            def load(slot: Any, first: int) -> Any:
                return wgmma_rows.load_rows(scratch.w.at[slot, 0], first, half, transforms[0])

            def multiply(total: Any, rows: Any, slot: Any, first: int) -> Any:
                return wgmma_rows.multiply(total, rows, x_read.at[slot], first, s.k_step, transforms[1])

            def add(step: Any, carry: Any) -> Any:
                total, rows = carry
                slot, next_slot = ring.at(step), ring.at(jnp.minimum(step + 1, ring.steps - 1))
                total = multiply(total, rows, slot, 0)

                @pl.when(step > 0)  # the products of the previous stage have ended
                def _() -> None:
                    plgpu.barrier_arrive(scratch.empty.at[ring.at(step - 1)])

                total = multiply(total, load(slot, half), slot, half)

                @pl.when(step + 1 < ring.steps)
                def _() -> None:
                    plgpu.barrier_wait(scratch.full.at[next_slot])

                return total, load(next_slot, 0)

            plgpu.barrier_wait(scratch.full.at[0])
            total = plgpu.layout_cast(jnp.zeros((64, s.rows), jnp.float32), plgpu.Layout.WGMMA)
            total, _ = lax.fori_loop(0, ring.steps, add, (total, load(0, 0)))
            total = wgmma_rows.finish(total)
            plgpu.barrier_arrive(scratch.empty.at[ring.at(ring.steps - 1)])
            wgmma_rows.store(total, out, place.column, place.row, s.columns, size)

    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    run = launch(
        "matmul_chain", kernel, out, {"block": scheduler.blocks}, [scratch], warpgroups={"warpgroup": 2}, interpret=interpret
    )
    return run(x, w)
