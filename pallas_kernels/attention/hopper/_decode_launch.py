"""The launches of decode: from a 16-bit cache, or of 8 bits, which become 16 in shared memory or in registers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._byte_key_loop import LeftRing, LeftStages
from pallas_kernels.attention.hopper._byte_ring import ByteRing, Bytes
from pallas_kernels.attention.hopper._decode_results import Results
from pallas_kernels.attention.hopper._key_loop import Spilled
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._ring import Ring, Stages
from pallas_kernels.attention.hopper._scratch import Scratch
from pallas_kernels.attention.hopper._setup import FAST
from pallas_kernels.attention.hopper._swapped_key_loop import Shared
from pallas_kernels.attention.hopper.columns import scratch as column_scratch
from pallas_kernels.parts.hopper.launch import launch
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

    def kernel(given: AttentionCall, values_ref: Any, numbers_ref: Any, memory: _Memory) -> None:
        results, scratch = Results(values_ref, numbers_ref), memory.scratch
        ring = Ring.of(s.stages, ring_source, setup.interpret, memory.ring)
        stored: Any = ring
        if memory.keys is not None and memory.values is not None:
            stored = ByteRing(s.byte_stages, setup.source, fp8, memory.keys, memory.values)
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
    keys, values = (
        Bytes.types(s.byte_stages, setup.source, width) if bytewise else None
        for width in (setup.size, setup.value_size)
    )
    spilled = Spilled(plgpu.SMEM((ROWS * setup.value_size,), jnp.float32), plgpu.SMEM((2, ROWS), jnp.float32))
    memory = _Memory(
        *_rows(body, dtype, 1),
        ring=Stages.types(s.stages, ring_source, setup.size, setup.value_size, dtype, 1),
        keys=keys,
        values=values,
        spilled=spilled if body.spills else None,
        shared=Shared(*column_scratch(dtype)) if s.swap else None,
    )
    return _launch(kernel, call, body, outputs, memory, warpgroups=4 if bytewise else 2)


class _Memory(NamedTuple):
    """Shared memory and barriers of a block of `run`: see `Scratch`, and the rings."""

    queries: Any
    queries_full: Any
    queries_free: Any
    ring: Stages
    keys: Bytes | None
    values: Bytes | None
    spilled: Spilled | None
    shared: Shared | None

    @property
    def scratch(self) -> Scratch:
        """What does not belong to a ring."""
        return Scratch(self.queries, self.queries_full, self.queries_free, self.spilled, self.shared)


class _ByteMemory(NamedTuple):
    """The same of `run_bytes`."""

    queries: Any
    queries_full: Any
    queries_free: Any
    shared: Shared
    ring: LeftStages


def run_bytes(
    call: AttentionCall, *, body: Any, fp8: bool, outputs: list[jax.ShapeDtypeStruct]
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel that makes wgmma's rows of the bytes in registers; arguments as for `run`.

    Widening, products and exponentials of a block follow each other in one warpgroup, so a block of the grid has
    several of them, each with items, stages and a copying warpgroup of its own; together they are a worker.
    """
    s, setup, dtype = body.schedule, body.setup, call.query[0].dtype
    interpret = bool(setup.interpret)
    shared = Shared(
        *(plgpu.SMEM((s.workers, *x.shape), x.dtype, transforms=x.transforms) for x in column_scratch(dtype))
    )

    def kernel(given: AttentionCall, values: Any, of_rows: Any, memory: _ByteMemory) -> None:
        warpgroup = lax.axis_index("warpgroup")

        def of(worker: Any) -> tuple[Scratch, LeftRing]:
            own = Shared(*(x.at[worker] for x in memory.shared))
            ring = LeftRing(worker, s.workers, s.byte_stages, setup.source, fp8, interpret, *memory.ring)
            return Scratch(memory.queries, memory.queries_full, memory.queries_free, None, own), ring

        def fill(ring: LeftRing, item: Any, position: Any) -> None:
            caches = given.key, given.value
            ring.fill(item.blocks, position, caches, given.page_table, item.sequence, item.head)

        @pl.when(warpgroup < s.workers)
        def _() -> None:
            if s.workers > 1:  # one has more than enough
                plgpu.set_max_registers(s.registers[0], action="increase")
            body.compute(warpgroup, given, Results(values, of_rows), *of(warpgroup))

        @pl.when(warpgroup >= s.workers)
        def _() -> None:
            if s.workers > 1:
                plgpu.set_max_registers(s.registers[1], action="decrease")
            worker = warpgroup - s.workers
            scratch, ring = of(worker)
            body.produce(worker, given, scratch, partial(fill, ring), ring)

    ring = LeftStages.types(s.workers, s.byte_stages, setup.source, setup.size, setup.value_size)
    memory = _ByteMemory(*_rows(body, dtype, s.workers), shared=shared, ring=ring)
    return _launch(kernel, call, body, outputs, memory, warpgroups=2 * s.workers)


def _rows(body: Any, dtype: Any, workers: int) -> tuple[Any, Any, Any]:
    """Returns the types of two tiles of queries for each worker, and of their barriers."""
    rows = plgpu.SMEM((2 * workers, body.tile_rows, body.setup.size), dtype, transforms=tiled(dtype, body.setup.size))
    return rows, plgpu.Barrier(num_barriers=2 * workers), plgpu.Barrier(num_barriers=2 * workers)


def _launch(
    kernel: Callable[..., None],
    call: AttentionCall,
    body: Any,
    outputs: list[jax.ShapeDtypeStruct],
    memory: Any,
    *,
    warpgroups: int,
) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel."""
    out, lse = launch(
        "attention_decode",
        kernel,
        outputs,
        {"block": body.grid},
        [memory],
        warpgroups={"warpgroup": warpgroups},
        parameters=FAST,
        interpret=body.setup.interpret,
    )(call)
    return out, lse
