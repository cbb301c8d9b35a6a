"""The kernel of the Hopper TF32 matmul for few rows and weights stored as (K, N).

wgmma reads float32 operands only along K. The ring of `mosaic_gpu_ring` therefore takes (N, K) weights; here every
computing warpgroup turns its tile of (K, N) weights in shared memory, so that few rows do not pay for a copy of the
weights. The weights are wgmma's rows. The accumulator is the same chain over K in steps of 8, so are its bits.
"""

import math
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import mosaic_gpu_ring as ring
from pallas_kernels.schedule.hopper import MatmulSchedule

_SWIZZLE: Final = ring.SWIZZLE_BYTES // 4
_TURNED: Final = 2  # turned tiles of a warpgroup: one is multiplied while the next is written


def turning_ring_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    schedule: MatmulSchedule,
    out_dtype: Any,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address.

    Args:
        x: (M, K), or a stack (B, M, K), float32; K a multiple of 8.
        w: (K, N) float32, N a multiple of 32. A stack where `x` is one; a matrix `x` beside a stack belongs to
            every entry.
        bias: (N',) of any float dtype, N' a multiple of the schedule's `block_n` and at least N; added in float32.
        schedule: Tiles and stages, with `swap`, `tile_rows` of 64, no clusters.
        out_dtype: Dtype of the result; rounded from the float32 accumulator once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) or (B, M, N) of `out_dtype`.
    """
    stack, (m, k), n, s = w.shape[:-2], x.shape[-2:], w.shape[-1], schedule
    x_rows = s.block_m if m > s.block_m else min(s.block_m, -(-m // 8) * 8)
    x_side = ring._Side(m, k, True, s.block_m, x_rows, _SWIZZLE, s.k_step)
    w_side = ring._Side(n, k, False, s.block_n, s.block_n, _SWIZZLE, s.k_step)
    row_tiles, column_tiles = -(-n // s.block_n), -(-m // s.block_m)
    tiles, k_steps = math.prod(stack) * row_tiles * column_tiles, -(-k // s.k_step)
    blocks = min(tiles, s.clusters) if s.clusters else tiles
    stages = min(s.stages, k_steps * -(-tiles // blocks))
    store = ring._store(s, m, n, jnp.dtype(out_dtype))
    alias = [not interpret and ragged for ragged in (x_side.ragged, store.ragged)]

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        bias_ref = refs[0] if bias is not None else None
        out_ref, w_smem, x_smem, out_smem, turned, full, empty = refs if bias is None else refs[1:]
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
            return place, row * s.block_n, column * s.block_m

        def produce() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(ring._PRODUCER_REGISTERS, action="decrease")

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)

                @pl.loop(0, k_steps)
                def _(step: Any) -> None:
                    position = tile * k_steps + step
                    slot, start = lax.rem(position, stages), step * s.k_step

                    @pl.when(position >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    w_side.copy(ring._in_stack(w_ref, place), w_smem, row, start, slot, full.at[slot], None)
                    x_side.copy(ring._in_stack(x_ref, place), x_plain, column, start, slot, full.at[slot], None)

            total = count * k_steps

            @pl.loop(0, jnp.minimum(total, stages))
            def _(i: Any) -> None:  # every signal is awaited
                plgpu.barrier_wait(empty.at[lax.rem(jnp.maximum(total - stages, 0) + i, stages)])

        def consume() -> None:
            if s.warpgroups > 1:
                plgpu.set_max_registers(ring._COMPUTE_REGISTERS[s.warpgroups], action="increase")
            offset = warpgroup * 64
            part = pl.ds(offset, 64) if s.warpgroups > 1 else slice(None)

            @pl.loop(0, count)
            def _(tile: Any) -> None:
                place, row, column = origin(tile)

                def multiply(accumulator: Any, step: Any) -> None:
                    slot = lax.rem(tile * k_steps + step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    weights = w_side.operand(w_smem, slot, 0, 1, part)
                    value = plgpu.load(weights, layout=plgpu.Layout.WGMMA_TRANSPOSED)
                    rows = turned.at[warpgroup, lax.rem(step, _TURNED)]
                    rows[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA)
                    plgpu.commit_smem()
                    width = s.k_step // x_side.pieces
                    for piece in range(x_side.pieces):
                        columns = x_side.operand(x_tiled, slot, piece, x_side.pieces, slice(None))
                        plgpu.wgmma(accumulator, rows.at[:, pl.ds(piece * width, width)], columns.transpose((1, 0)))

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
                    result, at_row = accumulator[...], row + offset
                    if bias_ref is not None:
                        result += ring._broadcast_bias(bias_ref, at_row, result.shape, True)
                    plain = None if out_plain is None else out_plain.at[warpgroup]
                    out = ring._in_stack(out_ref, place)
                    result = result.astype(out_dtype)
                    ring._put(store, result, True, out_tiled.at[warpgroup], plain, out, column, at_row)

                pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((64, s.tile_columns), jnp.float32))

            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == s.warpgroups)(produce)
        pl.when(warpgroup < s.warpgroups)(consume)

    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*stack, m, n), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            w_side.scratch(stages, jnp.float32, False),
            x_side.scratch(stages, jnp.float32, alias[0]),
            store.scratch(s.warpgroups, out_dtype, alias[1]),
            plgpu.SMEM(
                (s.warpgroups, _TURNED, 64, s.k_step), jnp.float32, transforms=ring._transforms(_SWIZZLE, jnp.float32)
            ),
            plgpu.Barrier(num_arrivals=1 + x_side.pieces, num_barriers=stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    result: jax.Array = launch(x, w) if bias is None else launch(x, w, bias)
    return result
