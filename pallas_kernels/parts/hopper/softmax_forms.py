"""Softmax kernels on a Hopper GPU that read rows directly from memory: `registers`, `split` and `warps`."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP
from pallas_kernels.parts.hopper.online_lanes import combine, combine_in_warp, merge, of_blocks
from pallas_kernels.parts.hopper.softmax_run import Arrays, Run
from pallas_kernels.parts.hopper.strip import Strip
from pallas_kernels.parts.hopper.tile import part_of_warpgroup
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.schedule.hopper.rows import WARP_VECTOR, WARPS
from pallas_kernels.schedule.hopper.softmax import fits_warp


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        lanes: Scratch for reducing the lanes of each warpgroup.
        segments: Statistics of the segments, if there are several.
        meeting: Barrier that completes when all segments are written.
    """

    lanes: Any
    segments: Any = None
    meeting: Any = None


def registers(run: Run, x: jax.Array, given: Sequence[jax.Array]) -> Arrays:
    """One block per row, one warpgroup per segment."""
    parts, interpret = run.segments, run.interpret
    several = parts.count > 1

    def kernel(source: Any, known: Sequence[Any], *refs: Any) -> None:
        *written, scratch = refs
        index = lax.axis_index("row")
        part = lax.axis_index("warpgroup") if several else 0
        row = run.row(index, source, known, written, part == 0 if several else True)

        def body(columns: int) -> None:
            blocks = run.read(row, part * parts.size, columns)
            lanes = of_blocks(blocks, interpret)
            if several:
                shared = scratch.segments
                shared[0, part], shared[1, part] = lanes
                plgpu.barrier_arrive(scratch.meeting)
                plgpu.barrier_wait(scratch.meeting)
                lanes = merge([(shared.at[0, p], shared.at[1, p]) for p in range(parts.count)], interpret)
            constants = run.finish(row, *combine(lanes, scratch.lanes.at[part], interpret))
            run.write(row, written, part * parts.size, columns, blocks, constants)

        parts.at(part, body)

    scratch = _Scratch(
        lanes=plgpu.SMEM((parts.count, 2, WARPGROUP), jnp.float32),
        segments=plgpu.SMEM((2, parts.count, WARPGROUP), jnp.float32) if several else None,
        meeting=plgpu.Barrier(num_arrivals=parts.count) if several else None,
    )
    return tuple(run.launch(kernel, run.out, {"row": run.rows}, [scratch], parts.count)(x, given))


def warps(run: Run, x: jax.Array, given: Sequence[jax.Array]) -> Arrays:
    """A warp or a part of one for each row; the interpreter, which has no warps, processes four rows in a block."""
    interpret = run.interpret
    threads, vector = (WARPGROUP, 1) if interpret else (run.schedule.threads, run.schedule.vector)
    together = WARPS if interpret else WARPGROUP // threads
    if not fits_warp(run.columns):
        raise ValueError(f"expected fewer than 1024 columns, a multiple of {WARP_VECTOR}, got {run.columns}.")
    width = threads * vector
    if not interpret and (run.columns % vector or width > WARPGROUP):
        raise ValueError(f"rows of {run.columns} columns do not allow {run.schedule}.")
    lanes = max(width, min(WARPGROUP, next_power_of_two(run.columns)))
    # For each strip of the lanes its blocks of columns.
    strips = [
        [
            Strip(block, lane, run.columns, lanes, vector, block + lanes <= run.columns, threads)
            for block in range(0, run.columns, WARPGROUP)
        ]
        for lane in range(0, lanes, width)
    ]

    def kernel(source: Any, known: Sequence[Any], *refs: Any) -> None:
        *written, scratch = refs
        first = lax.axis_index("block") * together

        def take(number: Any) -> None:
            # Past the last row, its threads repeat that row.
            row = run.row(jnp.minimum(first + number, run.rows - 1), source, known, written, True)
            loaded = [[s.load(source, row.index, interpret) for s in blocks] for blocks in strips]
            held = [
                [s.mask(x.astype(jnp.float32), -jnp.inf, interpret) for s, x in zip(blocks, given, strict=True)]
                for blocks, given in zip(strips, loaded, strict=True)
            ]
            statistics = [of_blocks(blocks, interpret) for blocks in held]
            constants = run.finish(row, *combine_in_warp(statistics, scratch, interpret, threads))
            if run.step is None:
                return
            for strip, block in zip(itertools.chain(*strips), itertools.chain(*held), strict=True):
                for result, value in zip(written[: run.results], run.step(row, block, *constants), strict=True):
                    strip.store(result, row.index, value.astype(result.dtype), interpret)

        if interpret:
            pl.loop(0, WARPS)(take)
        else:
            take(part_of_warpgroup(threads))

    memory = plgpu.SMEM((2, WARPGROUP), jnp.float32)
    return tuple(run.launch(kernel, run.out, {"block": -(-run.rows // together)}, [memory])(x, given))


def split(run: Run, x: jax.Array, given: Sequence[jax.Array]) -> Arrays:
    """One block per segment of each row, in two kernels."""
    parts, interpret = run.segments, run.interpret
    several = parts.count > 1

    def statistics(source: Any, lanes: Any) -> None:
        index, part = lax.axis_index("row"), lax.axis_index("part")
        row = run.row(index, source, [], [], False)

        def take(columns: int) -> None:
            blocks = run.read(row, part * parts.size, columns)
            lanes[index, 0, part], lanes[index, 1, part] = of_blocks(blocks, interpret)

        parts.at(part, take)

    def results(source: Any, lanes: Any, known: Sequence[Any], *refs: Any) -> None:
        *written, scratch = refs
        index, part = lax.axis_index("row"), lax.axis_index("part")
        row = run.row(index, source, known, written, part == 0 if several else True)

        def body(columns: int) -> None:
            blocks = [] if run.step is None else run.read(row, part * parts.size, columns)
            pairs = [(lanes.at[index, 0, p], lanes.at[index, 1, p]) for p in range(parts.count)]
            constants = run.finish(row, *combine(merge(pairs, interpret), scratch, interpret))
            run.write(row, written, part * parts.size, columns, blocks, constants)

        body(0) if run.step is None else parts.at(part, body)

    # All but the last axis of the grid are limited to 65535.
    each = {"part": parts.count, "row": run.rows}
    merged = each if run.step is not None else {"part": 1, "row": run.rows}
    lanes = jax.ShapeDtypeStruct((run.rows, 2, parts.count, WARPGROUP), jnp.float32)
    (found,) = run.launch(statistics, [lanes], each)(x)
    memory = plgpu.SMEM((2, WARPGROUP), jnp.float32)
    return tuple(run.launch(results, run.out, merged, [memory])(x, found, given))
