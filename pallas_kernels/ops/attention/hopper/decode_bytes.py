"""The launch of decode from a cache of 8 bits whose keys and values become wgmma's rows in registers.

Widening, products and exponentials of a block follow each other in one warpgroup, so a block of the grid has several of
them, each with items, stages and a copying warpgroup of its own; together they are a walker.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.ops.attention.hopper._byte_ring import Bytes
from pallas_kernels.ops.attention.hopper._byte_walk import LeftRing
from pallas_kernels.ops.attention.hopper._decode_results import Results
from pallas_kernels.ops.attention.hopper._scratch import Scratch
from pallas_kernels.ops.attention.hopper._swapped_walk import Shared
from pallas_kernels.ops.attention.hopper.prefill import Further, Lengths
from pallas_kernels.parts.hopper.columns import scratch as column_scratch
from pallas_kernels.parts.hopper.tile import tiled


def run_bytes(
    packed: tuple[jax.Array, ...],
    key: jax.Array,
    value: jax.Array,
    lengths: Lengths,
    further: Further,
    *,
    body: Any,
    fp8: bool,
    outputs: list[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel; arguments as for `decode._run`."""
    s, call, dtype = body.schedule, body.call, packed[0].dtype
    interpret = bool(call.interpret)
    narrow, wide, numbers = (
        plgpu.SMEM((s.walkers, *x.shape), x.dtype, transforms=x.transforms) for x in column_scratch(dtype)
    )

    def kernel(*refs: Any) -> None:
        rows, refs = refs[: len(packed)], refs[len(packed) :]
        caches, lengths, refs = refs[:2], Lengths(refs[2]), refs[3:]
        more, refs = further.refs(refs), refs[len(further.given) :]
        values, of_rows, queries, full, free, narrow, wide, numbers, *stages = refs
        warpgroup = lax.axis_index("warpgroup")

        def of(walker: Any) -> tuple[Scratch, LeftRing]:
            shared = Shared(*(x.at[walker] for x in (narrow, wide, numbers)))
            bytes_of = Bytes(*stages[:3]), Bytes(*stages[3:6])
            ring = LeftRing(walker, s.walkers, s.byte_stages, call.source, fp8, dtype, interpret, *bytes_of, stages[6])
            return Scratch(queries, full, free, None, shared), ring

        def fill(ring: LeftRing, item: Any, position: Any) -> None:
            factors = body.value_factors(more, item)
            ring.fill(item.blocks, position, caches, more.table, item.sequence, item.head, factors)

        @pl.when(warpgroup < s.walkers)
        def _() -> None:
            if s.walkers > 1:  # one has more than enough
                plgpu.set_max_registers(s.registers[0], action="increase")
            body.compute(warpgroup, lengths, more, Results(values, of_rows), *of(warpgroup))

        @pl.when(warpgroup >= s.walkers)
        def _() -> None:
            if s.walkers > 1:
                plgpu.set_max_registers(s.registers[1], action="decrease")
            walker = warpgroup - s.walkers
            scratch, ring = of(walker)
            body.produce(walker, rows, lengths, scratch, partial(fill, ring), ring)

    launch = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(body.grid,),
        grid_names=("block",),
        kernel_name="attention_decode",
        num_threads=2 * s.walkers,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2 * s.walkers, body.tile_rows, call.size), dtype, transforms=tiled(dtype, call.size)),
            *[plgpu.Barrier(num_barriers=2 * s.walkers)] * 2,
            narrow,
            wide,
            numbers,
            *LeftRing.scratch(s.walkers, s.byte_stages, call.source, call.size, call.value_size),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=call.interpret,
    )
    out, lse = launch(*packed, key, value, lengths.numbers, *further.given)
    return out, lse
