"""The launches of decode: from a 16-bit cache, or of 8 bits, which become 16 in shared memory or in registers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._byte_ring import ByteRing, Bytes
from pallas_kernels.attention.hopper._byte_walk import LeftRing
from pallas_kernels.attention.hopper._decode_results import Results
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._ring import Ring
from pallas_kernels.attention.hopper._scratch import Scratch
from pallas_kernels.attention.hopper._setup import refs_of
from pallas_kernels.attention.hopper._swapped_walk import Shared
from pallas_kernels.attention.hopper._walk import Parked
from pallas_kernels.attention.hopper.columns import scratch as column_scratch
from pallas_kernels.parts.hopper.tile import ROWS, tiled


def run(
    call: AttentionCall, *, body: Any, fp8: bool, outputs: list[jax.ShapeDtypeStruct]
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel that multiplies 16 bits, of a 16-bit cache or of bytes that warpgroups widen.

    Args:
        call: The call, with queries as `Items.packed` returns them, with numbers of heads as `Items.of_tiles` does, and
            with keys and values of float8 as bytes.
        body: The kernel's program, a `decode.Body`.
        fp8: Whether bytes are float8 numbers.
        outputs: What `Results` refers to.
    """
    s, setup, dtype, bytewise = body.schedule, body.setup, call.query[0].dtype, call.key.dtype.itemsize == 1

    def kernel(*refs: Any) -> None:
        given, refs = refs_of(call, refs)  # type: ignore[assignment]
        values_ref, numbers_ref, queries, queries_full, queries_free, *stages = refs
        parked = shared = None
        if body.parks:
            *stages, values, numbers = stages
            parked = Parked(values, numbers)
        if s.swap:
            *stages, narrow, wide, numbers = stages
            shared = Shared(narrow, wide, numbers)
        own, of_bytes = stages[: len(in_ring)], stages[len(in_ring) :]
        results = Results(values_ref, numbers_ref)
        scratch = Scratch(queries, queries_full, queries_free, parked, shared)
        ring = Ring(s.stages, ring_source, bool(setup.interpret), *own)
        stored: Any = ring
        if bytewise:
            stored = ByteRing(s.byte_stages, setup.source, fp8, Bytes(*of_bytes[:3]), Bytes(*of_bytes[3:]))
        program, warpgroup = body.inside(given), lax.axis_index("warpgroup")

        def fill(item: Any, position: Any) -> None:
            caches = given.key, given.value
            stored.fill(item.blocks, position, caches, given.page_table, item.sequence, item.head)

        @pl.when(warpgroup == 0)
        def _() -> None:
            if bytewise:
                plgpu.set_max_registers(s.registers[0], action="increase")
            program.compute(0, given, results, scratch, ring)

        @pl.when(warpgroup == 1)
        def _() -> None:
            if bytewise:
                plgpu.set_max_registers(s.registers[1], action="decrease")
            program.produce(0, given, scratch, fill, stored)

        for values in (False, True) if bytewise else ():

            @pl.when(warpgroup == 2 + values)
            def _(values: bool = values) -> None:
                plgpu.set_max_registers(s.registers[2], action="decrease")
                program.widen(values, given, stored, ring)

    # Bytes are copied into stages of their own; those of the ring are written by threads.
    ring_source = KeySource(setup.source.block) if bytewise else setup.source
    in_ring = Ring.scratch(s.stages, ring_source, setup.size, setup.value_size, dtype, 1)
    byte_stages = [
        kind
        for width in ((setup.size, setup.value_size) if bytewise else ())
        for kind in Bytes.scratch(s.byte_stages, setup.source, width)
    ]
    aside = [plgpu.SMEM((ROWS * setup.value_size,), jnp.float32), plgpu.SMEM((2, ROWS), jnp.float32)]
    stages = [*in_ring, *byte_stages, *(aside if body.parks else []), *(column_scratch(dtype) if s.swap else [])]
    return _launch(kernel, call, body, outputs, walkers=1, warpgroups=4 if bytewise else 2, stages=stages)


def run_bytes(
    call: AttentionCall, *, body: Any, fp8: bool, outputs: list[jax.ShapeDtypeStruct]
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel that makes wgmma's rows of the bytes in registers; arguments as for `run`.

    Widening, products and exponentials of a block follow each other in one warpgroup, so a block of the grid has
    several of them, each with items, stages and a copying warpgroup of its own; together they are a walker.
    """
    s, setup, dtype = body.schedule, body.setup, call.query[0].dtype
    interpret = bool(setup.interpret)
    narrow, wide, numbers = (
        plgpu.SMEM((s.walkers, *x.shape), x.dtype, transforms=x.transforms) for x in column_scratch(dtype)
    )

    def kernel(*refs: Any) -> None:
        given, refs = refs_of(call, refs)  # type: ignore[assignment]
        values, of_rows, queries, full, free, narrow, wide, numbers, *stages = refs
        warpgroup = lax.axis_index("warpgroup")

        def of(walker: Any) -> tuple[Scratch, LeftRing]:
            shared = Shared(*(x.at[walker] for x in (narrow, wide, numbers)))
            bytes_of = Bytes(*stages[:3]), Bytes(*stages[3:6])
            ring = LeftRing(walker, s.walkers, s.byte_stages, setup.source, fp8, interpret, *bytes_of, stages[6])
            return Scratch(queries, full, free, None, shared), ring

        def fill(ring: LeftRing, item: Any, position: Any) -> None:
            caches = given.key, given.value
            ring.fill(item.blocks, position, caches, given.page_table, item.sequence, item.head)

        @pl.when(warpgroup < s.walkers)
        def _() -> None:
            if s.walkers > 1:  # one has more than enough
                plgpu.set_max_registers(s.registers[0], action="increase")
            body.compute(warpgroup, given, Results(values, of_rows), *of(warpgroup))

        @pl.when(warpgroup >= s.walkers)
        def _() -> None:
            if s.walkers > 1:
                plgpu.set_max_registers(s.registers[1], action="decrease")
            walker = warpgroup - s.walkers
            scratch, ring = of(walker)
            body.produce(walker, given, scratch, partial(fill, ring), ring)

    stages = LeftRing.scratch(s.walkers, s.byte_stages, setup.source, setup.size, setup.value_size)
    stages = [narrow, wide, numbers, *stages]
    return _launch(kernel, call, body, outputs, walkers=s.walkers, warpgroups=2 * s.walkers, stages=stages)


def _launch(
    kernel: Callable[..., None],
    call: AttentionCall,
    body: Any,
    outputs: list[jax.ShapeDtypeStruct],
    *,
    walkers: int,
    warpgroups: int,
    stages: list[Any],
) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel with two tiles of queries and their barriers for each walker, and `stages` behind them."""
    setup, dtype = body.setup, call.query[0].dtype
    launch = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(body.grid,),
        grid_names=("block",),
        kernel_name="attention_decode",
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2 * walkers, body.tile_rows, setup.size), dtype, transforms=tiled(dtype, setup.size)),
            *[plgpu.Barrier(num_barriers=2 * walkers)] * 2,
            *stages,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=setup.interpret,
    )
    out, lse = launch(*jax.tree.leaves(call))
    return out, lse
