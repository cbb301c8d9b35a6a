"""The launches of decode: from a cache of 16 bits, or of 8 bits, which become 16 in shared memory or in registers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.hopper._byte_ring import ByteRing, Bytes
from pallas_kernels.ops.attention.hopper._byte_walk import LeftRing
from pallas_kernels.ops.attention.hopper._decode_results import Results
from pallas_kernels.ops.attention.hopper._keys import KeySource
from pallas_kernels.ops.attention.hopper._ring import Ring
from pallas_kernels.ops.attention.hopper._scratch import Scratch
from pallas_kernels.ops.attention.hopper._swapped_walk import Shared
from pallas_kernels.ops.attention.hopper._walk import Parked
from pallas_kernels.ops.attention.hopper.prefill import Further, Lengths
from pallas_kernels.parts.hopper.columns import scratch as column_scratch
from pallas_kernels.parts.hopper.tile import ROWS, tiled


def run(
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
    """Launches the kernel that multiplies 16 bits, of a cache of 16 bits or of bytes that warpgroups widen.

    Args:
        packed: The queries, as `Body.packed` returns them.
        key: As in `decode`, or the bytes of float8 numbers.
        value: The same.
        lengths: Numbers of each sequence.
        further: Further arrays, for rows of tiles.
        body: The kernel's program, a `decode.Body`.
        fp8: Whether bytes are float8 numbers.
        outputs: What `Results` refers to.
    """
    s, call, dtype, bytewise = body.schedule, body.call, packed[0].dtype, key.dtype.itemsize == 1

    def kernel(*refs: Any) -> None:
        rows, refs = refs[: len(packed)], refs[len(packed) :]
        (key_ref, value_ref), lengths, refs = refs[:2], Lengths(refs[2]), refs[3:]
        more, refs = further.refs(refs), refs[len(further.given) :]
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
        ring = Ring(s.stages, ring_source, bool(call.interpret), *own)
        stored: Any = ring
        if bytewise:
            stored = ByteRing(s.byte_stages, call.source, fp8, Bytes(*of_bytes[:3]), Bytes(*of_bytes[3:]))
        program, warpgroup = body.inside(more), lax.axis_index("warpgroup")

        def fill(stored: Any, table: Any, item: Any, position: Any) -> None:
            stored.fill(item.blocks, position, (key_ref, value_ref), table, item.sequence, item.head)

        @pl.when(warpgroup == 0)
        def _() -> None:
            if bytewise:
                plgpu.set_max_registers(s.registers[0], action="increase")
            program.compute(0, lengths, more, results, scratch, ring)

        @pl.when(warpgroup == 1)
        def _() -> None:
            if bytewise:
                plgpu.set_max_registers(s.registers[1], action="decrease")
            program.produce(0, rows, lengths, scratch, partial(fill, stored, more.table), stored)

        for values in (False, True) if bytewise else ():

            @pl.when(warpgroup == 2 + values)
            def _(values: bool = values) -> None:
                plgpu.set_max_registers(s.registers[2], action="decrease")
                program.widen(values, lengths, stored, ring)

    # Bytes are copied into stages of their own; those of the ring are written by threads.
    ring_source = KeySource(call.source.block) if bytewise else call.source
    in_ring = Ring.scratch(s.stages, ring_source, call.size, call.value_size, dtype, 1)
    byte_stages = [
        kind
        for width in ((call.size, call.value_size) if bytewise else ())
        for kind in Bytes.scratch(s.byte_stages, call.source, width)
    ]
    aside = [plgpu.SMEM((ROWS * call.value_size,), jnp.float32), plgpu.SMEM((2, ROWS), jnp.float32)]
    stages = [*in_ring, *byte_stages, *(aside if body.parks else []), *(column_scratch(dtype) if s.swap else [])]
    arrays = (*packed, key, value, lengths.numbers, *further.given)
    return _launch(kernel, arrays, body, outputs, walkers=1, warpgroups=4 if bytewise else 2, stages=stages)


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
    """Launches the kernel that makes wgmma's rows of the bytes in registers; arguments as for `run`.

    Widening, products and exponentials of a block follow each other in one warpgroup, so a block of the grid has
    several of them, each with items, stages and a copying warpgroup of its own; together they are a walker.
    """
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
            ring = LeftRing(walker, s.walkers, s.byte_stages, call.source, fp8, interpret, *bytes_of, stages[6])
            return Scratch(queries, full, free, None, shared), ring

        def fill(ring: LeftRing, item: Any, position: Any) -> None:
            ring.fill(item.blocks, position, caches, more.table, item.sequence, item.head)

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

    stages = LeftRing.scratch(s.walkers, s.byte_stages, call.source, call.size, call.value_size)
    stages = [narrow, wide, numbers, *stages]
    arrays = (*packed, key, value, lengths.numbers, *further.given)
    return _launch(kernel, arrays, body, outputs, walkers=s.walkers, warpgroups=2 * s.walkers, stages=stages)


def _launch(
    kernel: Callable[..., None],
    arrays: tuple[jax.Array, ...],
    body: Any,
    outputs: list[jax.ShapeDtypeStruct],
    *,
    walkers: int,
    warpgroups: int,
    stages: list[Any],
) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel with two tiles of queries and their barriers for each walker, and `stages` behind them."""
    call, dtype = body.call, arrays[0].dtype
    launch = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(body.grid,),
        grid_names=("block",),
        kernel_name="attention_decode",
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2 * walkers, body.tile_rows, call.size), dtype, transforms=tiled(dtype, call.size)),
            *[plgpu.Barrier(num_barriers=2 * walkers)] * 2,
            *stages,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=call.interpret,
    )
    out, lse = launch(*arrays)
    return out, lse
