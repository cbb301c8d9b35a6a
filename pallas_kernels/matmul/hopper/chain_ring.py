"""The kernel of the Hopper matmul for few rows, where the chain over K or the shared memory of few blocks is the limit.

A block has 8 to 64 columns of the weights, which a warpgroup reads into registers as wgmma's rows, half a stage at a
time, while the half before is multiplied. The accumulator is the same chain over K as in `hopper.ring`, with the same
bits.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.hopper import narrow_tile, wgmma_rows
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.narrow_tile import Columns
from pallas_kernels.matmul.hopper.operand import SWIZZLE_BYTES, Operand, loaded_rows, tile_transforms
from pallas_kernels.matmul.hopper.pipeline import Ring, TileScheduler, here
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.in_32_bits import in_32_bits

_HEAD: Final = 2  # instructions that are in flight while a warpgroup does other things
_STEP_BYTES: Final = 32  # of K in one instruction
_GROUP: Final = 8  # tiles along the columns that are processed before the next rows


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    w: Any
    x: Any
    full: Any
    empty: Any


@in_32_bits
def chain_matmul(
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue,
    *,
    schedule: ChainSchedule,
    transpose_w: bool = False,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that TMA can address.

    Args:
        x: (M, K), 2-byte or float32; K a multiple of 8.
        w: (K, N), or (N, K) with `transpose_w`, of the same dtype; N a multiple of 8, and of 16 for (K, N) of 2-byte
            elements.
        epilogue: A bias, whose size is a multiple of the schedule's columns, and an activation.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        out_dtype: Dtype of the result; rounded once from the float32 accumulator.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) of `out_dtype`.
    """
    (m, k), n, s, size = x.shape, w.shape[0 if transpose_w else 1], schedule, x.dtype.itemsize
    swizzle = SWIZZLE_BYTES // size
    x_side = Operand(m, k, True, s.rows, loaded_rows(m, s.rows), swizzle, s.k_step)
    w_swizzle = swizzle if transpose_w else min(swizzle, s.columns)
    w_side = Operand(n, k, transpose_w, s.columns, s.columns, w_swizzle, s.k_step)
    scheduler = TileScheduler((), w_side.tiles, x_side.tiles, s.columns, s.rows, _GROUP, 0)
    ring = Ring.of(scheduler, -(-k // s.k_step), s.stages)
    if w_side.ragged or not s.reads_inside(ring.stages):
        # In pieces every second 8 of wgmma's rows would not be swizzled as it reads them.
        s = replace(s, source="registers")
    columns = Columns(s.columns, size == 4 and not transpose_w)
    aliases = [side.ragged and not interpret for side in (w_side, x_side)]
    scratch = _Scratch(
        w=w_side.scratch(ring.stages, x.dtype, aliases[0]),
        x=x_side.scratch(ring.stages, x.dtype, aliases[1]),
        full=plgpu.Barrier(num_arrivals=w_side.pieces + x_side.pieces, num_barriers=ring.stages),
        empty=plgpu.Barrier(num_barriers=ring.stages),
    )

    def kernel(x: Any, w: Any, epilogue: Epilogue, out: Any, scratch: _Scratch) -> None:
        warpgroup, block = here()
        place = scheduler.place(block, 0)
        (w_read, w_copied), (x_read, x_copied) = (
            tuple(ref) if alias else (ref, ref) for ref, alias in zip(scratch[:2], aliases, strict=True)
        )

        @pl.when(warpgroup == 1)
        def copy_tiles() -> None:
            def copy(_: Any, __: Any, step: Any, slot: Any) -> None:
                k, full = step * s.k_step, scratch.full.at[slot]
                w_side.copy([w], w_copied, place.row, k, slot, full)
                x_side.copy([x], x_copied, place.column, k, slot, full)

            ring.produce(1, scratch.empty, lambda _: None, copy)

        @pl.when(warpgroup == 0)
        def multiply_tiles() -> None:
            total = _sum(s, ring, scratch._replace(w=w_read, x=x_read), w_side, interpret)
            bias = epilogue.bias
            if bias is not None:
                bias = narrow_tile.bias_of(bias, place.row, s.rows, columns, interpret)
            total = epilogue.before_residual((total,), bias, plgpu.Layout.WGMMA, interpret)
            narrow_tile.store(total, out, place.column, place.row, columns, interpret)

    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    run = launch(
        "matmul_chain",
        kernel,
        out,
        {"block": scheduler.blocks},
        [scratch],
        warpgroups={"warpgroup": 2},
        interpret=interpret,
    )
    result: jax.Array = run(x, w, epilogue)
    return result


def _sum(s: ChainSchedule, ring: Ring, scratch: _Scratch, w_side: Operand, interpret: Any) -> Any:
    """Returns the sums of a tile; half of the rows of a stage are read while the half before is multiplied."""
    half, x = s.k_step // 2, scratch.x
    transforms = tile_transforms(w_side.swizzle, x.dtype)
    x_transforms = tile_transforms(SWIZZLE_BYTES // jnp.dtype(x.dtype).itemsize, x.dtype)

    def weights(slot: Any) -> Any:
        return scratch.w.at[slot] if w_side.k_major else scratch.w.at[slot, 0]

    both, head = s.source == "both", s.queued if s.source == "both" else _HEAD

    def load(slot: Any, first: int) -> Any:
        if interpret:
            return jnp.float32(0)
        if both:
            rest = head * _STEP_BYTES // x.dtype.itemsize
            return wgmma_rows.load_rows(weights(slot), first + rest, half - rest, transforms)
        return wgmma_rows.load_rows(weights(slot), first, half, transforms)

    def begin(total: Any, rows: Any, slot: Any, first: int) -> Any:
        if interpret:
            return total if first else total + _interpreted_product(weights(slot), x.at[slot])
        if both:
            return wgmma_rows.begin_in_memory(total, weights(slot), x.at[slot], first, s.k_step, head, transforms)
        return wgmma_rows.begin(total, rows, x.at[slot], first, s.k_step, head, x_transforms)

    def go_on(total: Any, rows: Any, slot: Any, first: int, next_slot: Any, next_first: int) -> tuple[Any, Any]:
        if interpret:
            return total, rows
        ahead: dict[str, Any] = {"tile": weights(next_slot), "next_first": next_first, "apart": both}
        of_both = x_transforms, transforms
        return wgmma_rows.go_on(total, rows, x.at[slot], first, s.k_step, head, **ahead, transforms=of_both)

    def add_stage(step: Any, carry: Any) -> Any:
        total, slot, previous = carry
        plgpu.barrier_wait(scratch.full.at[slot])
        if interpret:
            total = total + _interpreted_product(weights(slot), x.at[slot])
        else:
            steps = s.k_step * x.dtype.itemsize // _STEP_BYTES
            total = wgmma_rows.begin_in_memory(total, weights(slot), x.at[slot], 0, s.k_step, steps, transforms)

        @pl.when(step > 0)  # the products of the previous stage have ended
        def _() -> None:
            plgpu.barrier_arrive(scratch.empty.at[previous])

        return total, jnp.where(slot == ring.stages - 1, 0, slot + 1), slot

    def add(step: Any, carry: Any) -> Any:
        total, rows, slot, previous = carry
        # Counted: a remainder would be some twenty dependent instructions, which no product hides.
        following = jnp.where(slot == ring.stages - 1, 0, slot + 1)
        total = begin(total, rows, slot, 0)

        @pl.when(step > 0)  # the products of the previous stage have ended
        def _() -> None:
            plgpu.barrier_arrive(scratch.empty.at[previous])

        total, rows = go_on(total, rows, slot, 0, slot, half)
        total = begin(total, rows, slot, half)

        @pl.when(step + 1 < ring.steps)
        def _() -> None:
            plgpu.barrier_wait(scratch.full.at[following])

        return *go_on(total, rows, slot, half, following, 0), following, slot

    if s.source == "registers":
        plgpu.barrier_wait(scratch.full.at[0])
    total = plgpu.layout_cast(jnp.zeros((64, s.rows), jnp.float32), plgpu.Layout.WGMMA)
    if s.source == "memory":
        total, *_ = lax.fori_loop(0, ring.steps, add_stage, (total, jnp.int32(0), jnp.int32(0)))
    else:
        if s.source == "both":
            plgpu.barrier_wait(scratch.full.at[0])
        total, *_ = lax.fori_loop(0, ring.steps, add, (total, load(0, 0), jnp.int32(0), jnp.int32(0)))
    if not interpret:
        total = wgmma_rows.finish(total)
    plgpu.barrier_arrive(scratch.empty.at[ring.at(ring.steps - 1)])
    return total


def _interpreted_product(w: Any, x: Any) -> jax.Array:
    """Returns the product of a stage, (64, rows), for the interpreter."""
    columns, rows = (_matrix(ref[...].astype(jnp.float32)) for ref in (w, x))
    plgpu.commit_smem()  # ordinary reads, before TMA writes again
    product = jnp.dot(columns if len(w.shape) == 3 else columns.T, rows.T, precision=lax.Precision.HIGHEST)
    return jnp.pad(product, ((0, 64 - product.shape[0]), (0, 0)))


def _matrix(stage: jax.Array) -> jax.Array:
    """Returns a stage in pieces along K as one matrix."""
    return stage if stage.ndim == 2 else jnp.concatenate(list(stage), -1)
