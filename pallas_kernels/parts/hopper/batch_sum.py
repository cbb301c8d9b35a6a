"""Sums over the rows of a batch on a Hopper GPU, in the order of `ChunkContract`.

A block handles a chunk of 128 rows and a strip of columns, distributed over its threads. It applies a step to each row
and adds the results by a halving tree: its warpgroups divide the eight sums of 16 rows that the last three tree levels
add. A second kernel adds the chunk sums in ascending order. No atomics: the contract fixes the order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ROW_CHUNK, ChunkContract
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, strided
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.parts.hopper.strip import Strip
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.batch_sum import FEW_ROWS, PARTS, ChunkSchedule, chunk_schedule

_AT_ONCE: Final = 64  # chunk sums that are loaded together

Step = Callable[..., jax.Array]


def supports(columns: int, contract: ChunkContract) -> bool:
    """Whether the kernels support rows of this length and this contract."""
    return columns >= WARPGROUP and contract.rows == ROW_CHUNK


@in_32_bits
def sum_chunks(
    step: Step,
    rows: Sequence[jax.Array],
    total: jax.Array | None = None,
    *,
    given: Sequence[jax.Array] = (),
    dtype: Any = jnp.float32,
    interpret: Any,
    schedule: ChunkSchedule | None = None,
) -> jax.Array:
    """Applies a step to every row and adds the results.

    Args:
        step: Maps float32 columns of each array and the row's scalars to float32 columns, column by column.
        rows: (M, C) arrays; C at least 128.
        total: (C,) float32, the initial value of the sum; zeros by default.
        given: (M, 1) float32 arrays, scalars of each row.
        dtype: Dtype of the result; the sum is rounded once.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How the work is partitioned; chosen from the shape by default. It does not affect the bits.

    Returns:
        (C,) of `dtype`.
    """
    m, c = rows[0].shape
    if m == 0:
        return (jnp.zeros(c, jnp.float32) if total is None else total).astype(dtype)
    if schedule is None:
        schedule = chunk_schedule(m, c, max(x.dtype.itemsize for x in rows))
    if total is None and interpret:
        total = jnp.zeros(c, jnp.float32)  # XLA would drop an addition of a constant zero, leaving -0
    start = [] if total is None else [total]
    if m <= ROW_CHUNK:
        return _chunk_sums(step, rows, given, start, dtype, interpret, schedule).reshape(c)
    sums = _chunk_sums(step, rows, given, [], jnp.float32, interpret, schedule)
    return add_upwards(sums, start, dtype, interpret)


def _chunk_sums(
    step: Step,
    rows: Sequence[jax.Array],
    given: Sequence[jax.Array],
    start: Sequence[jax.Array],
    dtype: Any,
    interpret: Any,
    schedule: ChunkSchedule,
) -> jax.Array:
    """(chunks, C); a single chunk is added to `start` or to zero."""
    m, c = rows[0].shape
    add_chunk, width = chunk_body(step, m, c, dtype, schedule, interpret), WARPGROUP * schedule.neighbours

    def kernel(*refs: Any) -> None:
        add_chunk(lax.axis_index("chunk"), lax.axis_index("strip"), lax.axis_index("warpgroup"), *refs)

    run = launch(
        "batch_sum_" + profile_name(step),
        kernel,
        jax.ShapeDtypeStruct((-(-m // ROW_CHUNK), c), dtype),
        {"strip": -(-c // width), "chunk": -(-m // ROW_CHUNK)},
        chunk_memory(schedule),
        warpgroups={"warpgroup": schedule.warpgroups},
        by_lanes=True,
        interpret=interpret,
    )
    return run(rows, given, start)


def chunk_memory(schedule: ChunkSchedule) -> list[Any]:
    """Returns the shared memory of a block that sums a strip of a chunk."""
    if schedule.apart:
        return []
    memory: list[Any] = [plgpu.SMEM((PARTS, WARPGROUP * schedule.neighbours), jnp.float32)]
    if schedule.warpgroups > 1:
        memory.append(plgpu.Barrier(num_arrivals=schedule.warpgroups))
    return memory


def chunk_body(step: Step, m: int, c: int, dtype: Any, schedule: ChunkSchedule, interpret: Any) -> Callable[..., None]:
    """Returns the body of a block that sums a strip of a chunk.

    Args:
        step: As for `sum_chunks`.
        m: Number of rows.
        c: Number of columns.
        dtype: Dtype of the sums.
        schedule: How the work is partitioned.
        interpret: As for `sum_chunks`.

    Returns:
        A function of the indices of the chunk, the strip and the warpgroup, of the rows, their scalars, what a single
        chunk is added to (an empty sequence for zero), the sums (chunks, C), and the shared memory of `chunk_memory`.
    """
    width, warpgroups = WARPGROUP * schedule.neighbours, schedule.warpgroups
    few = m <= FEW_ROWS
    leaf = functools.partial(_leaf, step, m, interpret)
    if PARTS % warpgroups or width > c or c % schedule.neighbours:
        raise ValueError(
            f"expected 1, 2, 4 or {PARTS} warpgroups, neighbours that divide {c} columns, and strips within them; "
            f"got {schedule}."
        )

    def body(
        chunk: Any, number: Any, warpgroup: Any, sources: Any, numbers: Any, begin: Any, out: Any, parts: Any,
        *meeting: Any,
    ) -> None:  # fmt: skip
        first = chunk * ROW_CHUNK

        def add(strip: Strip) -> None:
            def finish(total: jax.Array) -> None:
                if begin:
                    total = strip.load(begin[0], None, interpret) + total
                elif m <= ROW_CHUNK:
                    total = total + jnp.float32(0)
                strip.store(out, chunk, total.astype(dtype), interpret)

            if few:
                # Missing rows count as zeros and are not loaded.
                def present(row: int) -> jax.Array | None:
                    return leaf(strip, first + row, sources, numbers) if row < m else None

                pl.when(warpgroup == 0)(lambda: finish(_tree(present, ROW_CHUNK)))
                return

            @pl.loop(0, PARTS // warpgroups)
            def _(turn: Any) -> None:
                part = turn * warpgroups + warpgroup
                parts[part, :] = _tree(
                    lambda k: leaf(strip, first + part + PARTS * k, sources, numbers), ROW_CHUNK // PARTS
                )

            def finish_parts() -> None:
                finish(_tree(lambda part: plgpu.load(parts.at[part], layout=strided(width)), PARTS))

            if not meeting:
                finish_parts()  # each thread reads only what it wrote
                return
            plgpu.commit_smem()
            plgpu.barrier_arrive(meeting[0])
            plgpu.barrier_wait(meeting[0])
            pl.when(warpgroup == 0)(finish_parts)

        _in_strips(number, c, schedule.neighbours, add)

    return body


def part_body(step: Step, m: int, c: int, schedule: ChunkSchedule, interpret: Any) -> Callable[..., None]:
    """Returns the body of a warpgroup that sums a strip of a part of a chunk, 16 rows.

    Args:
        step: As for `sum_chunks`.
        m: Number of rows.
        c: Number of columns.
        schedule: How the work is partitioned.
        interpret: As for `sum_chunks`.

    Returns:
        A function of the indices of the part and the strip, of the rows, their scalars, and the sums (parts, C).
    """

    def body(part: Any, number: Any, sources: Any, numbers: Any, out: Any) -> None:
        first = lax.div(part, PARTS) * ROW_CHUNK + lax.rem(part, PARTS)

        def add(strip: Strip) -> None:
            def leaf(k: int) -> jax.Array:
                return _leaf(step, m, interpret, strip, first + PARTS * k, sources, numbers)

            strip.store(out, part, _tree(leaf, ROW_CHUNK // PARTS), interpret)

        # A block may have more warpgroups than there are strips left.
        pl.when(number < -(-c // (WARPGROUP * schedule.neighbours)))(
            lambda: _in_strips(number, c, schedule.neighbours, add)
        )

    return body


def _leaf(
    step: Step, m: int, interpret: Any, strip: Strip, row: Any, sources: Sequence[Any], numbers: Sequence[Any]
) -> jax.Array:
    """Returns a strip of the results of a step on a row; zeros past the last row."""
    masked = m % ROW_CHUNK != 0
    inside = jnp.minimum(row, m - 1) if masked else row
    columns = [strip.load(s, inside, interpret).astype(jnp.float32) for s in sources]
    value = step(*columns, *(n[inside, 0] for n in numbers))
    return jnp.where(jnp.broadcast_to(row, value.shape) < m, value, jnp.float32(0)) if masked else value


def add_upwards(
    sums: jax.Array, start: Sequence[jax.Array], dtype: Any, interpret: Any, *, parts: int = 1
) -> jax.Array:
    """Adds the sums of chunks, (chunks, C) float32, in ascending order to `start` or to zero: (C,) of `dtype`.

    Sums of parts, (chunks * parts, C), are first added by a halving tree for each chunk.
    """
    chunks, c = sums.shape[0] // parts, sums.shape[1]

    def kernel(sums: Any, begin: Sequence[Any], out: Any) -> None:
        def add_strip(strip: Strip) -> None:
            def load(first: Any, count: int) -> list[jax.Array]:
                rows = [strip.load(sums, first * parts + i, interpret) for i in range(count * parts)]
                return [_tree(rows[i * parts : (i + 1) * parts].__getitem__, parts) for i in range(count)]

            def add(first: Any, count: int, total: jax.Array) -> jax.Array:
                for column in load(first, count):
                    total = total + column
                return total

            first, at_once = 0 if begin else 1, _AT_ONCE // parts
            total = strip.load(begin[0], None, interpret) if begin else load(0, 1)[0]
            if not begin:
                total = total + jnp.float32(0)
            groups, left = divmod(chunks - first, at_once)
            if groups:
                total = lax.fori_loop(0, groups, lambda i, total: add(first + i * at_once, at_once, total), total)
            strip.store(out, 0, add(first + groups * at_once, left, total).astype(dtype), interpret)

        _in_strips(lax.axis_index("strip"), c, 1, add_strip)

    out, grid = jax.ShapeDtypeStruct((1, c), dtype), {"strip": -(-c // WARPGROUP)}
    run = launch("batch_sum_upwards", kernel, out, grid, by_lanes=True, interpret=interpret)
    return run(sums, start).reshape(c)


def _in_strips(number: Any, columns: int, neighbours: int, body: Callable[[Strip], None]) -> None:
    """Calls `body` with a strip of a row of `columns` columns, given by its number; the last one may not be full."""
    width = WARPGROUP * neighbours
    whole, rest = divmod(columns, width)

    def full() -> None:
        body(Strip(number * width, 0, columns, width, neighbours, whole=True))

    if not rest:
        full()
        return
    pl.when(number < whole)(full)
    pl.when(number == whole)(lambda: body(Strip(whole * width, 0, columns, width, neighbours, whole=False)))


def _tree(leaf: Callable[[Any], Any], count: int) -> Any:
    """Adds leaves 0 .. count - 1 by a halving tree (leaf i plus leaf i + count / 2, and so on). None counts as zero."""

    def node(at: int, stride: int) -> Any:
        if stride == count:
            return leaf(at)
        low, high = node(at, 2 * stride), node(at + stride, 2 * stride)
        if low is not None and high is not None:
            return low + high
        present = high if low is None else low
        # Adding zero is not a no-op: it turns -0 into +0.
        return None if present is None else present + jnp.float32(0)

    return node(0, 1)
