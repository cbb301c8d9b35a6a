"""The engine of the row kernels on a Hopper GPU.

A row program reads its row in passes: a fold reduces the results of a step over all columns, in the order of
`RowContract`; `emit` writes full-width results. The engine loads the data for the passes. One to eight warpgroups (a
team) share a row; each owns some of the lanes, and each thread 4 or 8 neighbouring ones. A block processes its rows
sequentially, from a circular buffer in shared memory into which they are prefetched, or directly from memory. A row
that fits in the buffer or in the team's registers is read from memory once, a longer one once per pass. Many short rows
are processed by a warp each, which needs neither shared memory nor a barrier. Where a program waits for the sums of its
row, a thread's columns are spread over one group of 128 lanes, so that it adds most of the group's tree by itself.

How to write a kernel on it (`pallas_kernels/norm/hopper.py` holds more):

    def program(row):
        square = row.fold(lambda x: row.product(x, x))
        factor = row.quotient(1, row.square_root(row.quotient(square, columns) + eps))
        row.put(0, factor)                                    # one number for the row
        row.emit(lambda x, w: (row.product(row.product(x, factor), w),))     # rounded to the dtype of the result

    y, factor = run_rows(program, [x], [weight], [x.dtype], numbers=1, interpret=False)

Steps take float32 columns, a multiple of 128; first the arrays, then the vectors. They must be elementwise. The engine
masks columns past the end of the row. Use `row.product` for products that may be followed by a sum or difference, and
`row.quotient` and `row.square_root` for divisions and roots of scalars: then every step is correctly rounded, on the
GPU and under the interpreter.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import row_contract
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP
from pallas_kernels.parts.hopper.launch import launch as launch_kernel
from pallas_kernels.parts.hopper.pieces import Pieces
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_launch import COLUMN_NUMBERS as COLUMN_NUMBERS
from pallas_kernels.parts.hopper.row_launch import Companion as Companion
from pallas_kernels.parts.hopper.row_launch import Launch
from pallas_kernels.parts.hopper.row_launch import Parted as Parted
from pallas_kernels.parts.hopper.row_launch import Picked as Picked
from pallas_kernels.parts.hopper.team import Team
from pallas_kernels.parts.hopper.tile import part_of_warpgroup
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.rows import COPY_BYTES, WARP_VECTOR, RowSchedule, row_schedule, row_vector

Arrays = tuple[jax.Array, ...]
Program = Callable[[Any], None]


_ALIGN: Final = 16  # row alignment in bytes that TMA requires
_LEAST_VECTOR: Final = 4  # neighbours of a thread for which a warp holds a group of lanes


NEEDS: Final = "rows of at least 128 columns, of whole 16 bytes in every dtype"
"""The requirements that `supports` checks, for error messages."""


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether the engine supports rows (and vectors) of `columns` columns of these dtypes."""
    return columns >= WARPGROUP and all(columns * jnp.dtype(d).itemsize % _ALIGN == 0 for d in dtypes)


class _Counter:
    """A substitute for a row that counts the passes of a program."""

    def __init__(self) -> None:
        self.passes = 0
        self.folds = 0
        self.exchanges = 0
        self._kinds: set[str] = set()

    @classmethod
    def of(cls, program: Program) -> "_Counter":
        """Returns the counts of a program."""
        counter = cls()
        jax.eval_shape(lambda: program(counter))
        return counter

    @property
    def sums(self) -> int:
        """Returns the number of sums of a program that takes nothing but sums, else 0."""
        return self.exchanges if self._kinds == {"add"} else 0

    def fold(self, *_: Any, combine: Any = "add", **__: Any) -> Any:
        self._kinds.update([combine] if isinstance(combine, str) else combine)
        self.passes += 1
        self.folds += 1
        self.exchanges += 1 if isinstance(combine, str) else len(combine)
        return jnp.float32(1) if isinstance(combine, str) else (jnp.float32(1),) * len(combine)

    def emit(self, _: Any, **__: Any) -> None:
        self.passes += 1

    def derive(self, *_: Any, **__: Any) -> None:
        pass

    def put(self, *_: Any) -> None:
        pass

    def given(self, _: int, column: int = 0) -> jax.Array:
        del column
        return jnp.float32(1)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return a * b

    quotient = product

    def square_root(self, a: jax.Array) -> jax.Array:
        return a


@in_32_bits
def run_rows(
    program: Program,
    rows: Sequence[jax.Array | Picked],
    vectors: Sequence[jax.Array | Picked] = (),
    results: Sequence[Any] = (),
    *,
    given: Sequence[jax.Array] = (),
    numbers: int = 0,
    count: int | None = None,
    lanes: int | None = None,
    interpret: Any,
    schedule: RowSchedule | None = None,
    name: str | None = None,
    companion: Companion | None = None,
    plain: bool = False,
) -> Arrays:
    """Runs a row program.

    Args:
        program: Called with a `Row`.
        rows: (M, C) arrays that `supports` allows, or `Picked` arrays.
        vectors: (C,) arrays that `supports` allows, shared by all rows, or `Picked` arrays.
        results: Dtypes of the (M, C) results of `emit`, or `Parted`.
        given: (M, N) arrays, scalars of each row.
        numbers: How many (M, 1) float32 results the program puts.
        count: M, required if the first array is picked.
        lanes: Lanes of a block, a power of two, for programs whose folds are exact in any order; by default the lanes
            of `RowContract`.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How to feed the rows; chosen from the shape by default. It does not affect the bits.
        name: Name of the kernel in profiles; by default derived from the function that defines the program.
        companion: Other blocks of the launch, for a schedule with a block for each row.
        plain: As for `row_schedule`.

    Returns:
        The results, then the numbers, then the companion's result if there is one.
    """
    sources, shared = ([x if isinstance(x, Picked) else Picked(x, None) for x in group] for group in (rows, vectors))
    m, c = (sources[0].array.shape[0] if count is None else count), sources[0].array.shape[1]
    wanted = [d if isinstance(d, Parted) else Parted(d) for d in results]
    out = [jax.ShapeDtypeStruct((m * w.parts, c), w.dtype) for w in wanted]
    out += [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * numbers
    if m == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    counter = _Counter.of(program)
    lanes = row_contract().lanes(c) if lanes is None else lanes
    sizes = tuple(x.array.dtype.itemsize for x in sources)
    wide_sizes = tuple(jnp.dtype(w.dtype).itemsize for w in wanted)
    if schedule is None:
        apart = any(x.place is not None for x in (*sources, *shared))
        how: dict[str, Any] = {"picked": apart, "plain": plain, "sums": counter.sums}
        schedule = row_schedule(m, c, lanes, sizes, wide_sizes, len(vectors), counter.passes, **how)
    schedule = replace(schedule, blocks=min(schedule.blocks, -(-m // schedule.rows_per_block)))
    vector, held = _threads(schedule, lanes, (*sizes, *wide_sizes), interpret)
    _check_schedule(schedule, m, c, lanes, vector, sizes)
    direct = schedule.stages == 0
    pieces = Pieces.of(c, c if direct else schedule.stage)
    blocks, team, cluster = schedule.blocks, schedule.team, schedule.cluster
    exchange = (max(1, counter.exchanges * (2 if counter.folds == 1 else 1)), max(WARPGROUP, lanes // WARPGROUP))
    grid, emulated = blocks, bool(interpret) and cluster > 1
    if companion is not None:
        companion.check(schedule, m)
        out.append(companion.out)
        grid = companion.grid(m)
    if emulated:
        out.append(jax.ShapeDtypeStruct((grid, *exchange), jnp.float32))

    def kernel(read: Any, beside: Any, known: Any, others: Any, *refs: Any) -> None:
        *written, scratch, memory = refs
        first_row = block = lax.axis_index("block")
        if companion is not None:
            turn = companion.turn(block)
            first_row = turn.row
        shared_memory = written.pop().at[block] if emulated else scratch.exchange
        member = lax.axis_index("member") if team > 1 else 0
        if cluster > 1:
            member += lax.axis_index("part") * team
        launch = Launch(
            sources=[(ref, x.place) for ref, x in zip(read, sources, strict=True)],
            vectors=[(ref, x.place) for ref, x in zip(beside, shared, strict=True)],
            given=known,
            results=list(zip(written[: len(wanted)], wanted, strict=True)),
            numbers=written[len(wanted) : len(wanted) + numbers],
            team=Team(lanes, cluster, shared_memory, scratch.meeting, interpret, **held),
            barriers=scratch.barriers,
            ring=scratch.ring,
            pieces=pieces,
            columns=c,
            vector=vector,
            passes=counter.passes,
            folds=counter.folds,
            exchanges=counter.exchanges,
            member=member,
            first_row=first_row,
            rows=lax.div(m - first_row + blocks - 1, blocks),
            schedule=schedule,
        )
        if companion is None:
            _run_block(program, launch, m)
        else:
            if schedule.ahead:
                later = companion.turn(block + schedule.ahead)
                launch.prefetch(later.row, (later.place >= 0) & (later.row < m))
            result = written[len(wanted) + numbers]
            turn.run(m, lambda: program(Row(launch, first_row, 0)), member, schedule.members, others, result, memory)

    run = launch_kernel(
        profile_name(program) if name is None else name,
        kernel,
        out,
        {"block": grid},
        [
            _Scratch.of(schedule, pieces, exchange, [x.array.dtype for x in sources], interpret),
            [] if companion is None else companion.memory,
        ],
        cluster={"part": cluster} if cluster > 1 else None,
        warpgroups={"member": team} if team > 1 else None,
        by_lanes=True,
        interpret=interpret,
    )
    arrays = ([x.array for x in group] for group in (sources, shared))
    found = tuple(run(*arrays, given, () if companion is None else companion.arrays))
    return found[: len(results) + numbers + (companion is not None)]


def _run_block(program: Program, launch: Launch, m: int) -> None:
    """Processes the rows of a block."""
    schedule, first = launch.schedule, launch.first_row
    if schedule.stages:
        pl.loop(0, schedule.stages)(launch.fetch)
    if schedule.preload:
        launch.preload()
    if schedule.rows_per_warp:
        _run_by_warp(program, launch, m)
    elif schedule.blocks == m:
        if schedule.ahead:
            launch.prefetch(first + schedule.ahead, first + schedule.ahead < m)
        program(Row(launch, first, 0))
    else:
        pl.loop(0, launch.rows)(lambda i: program(Row(launch, first + i * schedule.blocks, i)))


def _run_by_warp(program: Program, launch: Launch, m: int) -> None:
    """Processes the rows of a block, each in a warp or a part of one; the interpreter has no warps."""
    each = launch.schedule.rows_per_warp
    own: Sequence[Any] = range(launch.schedule.rows_per_block)
    if not launch.team.interpret:
        part = part_of_warpgroup(launch.schedule.threads)
        own = [part * each + i for i in range(each)]
    # Past the last row, the threads of another one repeat that row.
    numbers = [launch.first_row * launch.schedule.rows_per_block + i for i in own]
    rows = [Row(launch, jnp.minimum(number, m - 1), i) for i, number in enumerate(numbers)]
    for row in rows:
        row.read()
    for row in rows:
        program(row)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        exchange: Scratch for reducing the lanes of a team; None where the interpreter uses device memory instead.
        meeting: The barrier of the team under the interpreter.
        barriers: A barrier for each stage.
        ring: The stages of each array; empty if rows are read directly from memory.
    """

    exchange: Any
    meeting: Any
    barriers: Any
    ring: Sequence[Any]

    @classmethod
    def of(
        cls, schedule: RowSchedule, pieces: Pieces, exchange: tuple[int, int], dtypes: Sequence[Any], interpret: Any
    ) -> "_Scratch":
        """Returns the types."""
        clusters, stages = schedule.cluster > 1, schedule.stages
        meeting: Any = None
        if interpret and clusters:
            meeting = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=schedule.team)
        elif interpret:
            meeting = plgpu.Barrier(num_arrivals=schedule.team)
        return cls(
            exchange=None if interpret and clusters else plgpu.SMEM(exchange, jnp.float32),
            meeting=meeting,
            barriers=plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=stages) if stages else None,
            ring=[plgpu.SMEM((stages, pieces.capacity), dtype) for dtype in dtypes] if stages else [],
        )


def _threads(schedule: RowSchedule, lanes: int, itemsizes: Sequence[int], interpret: Any) -> tuple[int, dict[str, int]]:
    """Returns the neighbouring columns of a thread, and the arguments of `Team` that say which threads have a row."""
    if not schedule.rows_per_warp:
        vector = schedule.vector or row_vector(lanes, itemsizes)
        spread = schedule.strips(lanes, vector) if schedule.spread and not interpret else 0
        return vector, {"threads": WARPGROUP, "spread": spread}
    if interpret:  # it has no warps
        return 1, {"threads": WARPGROUP, "spread": 0}
    return schedule.vector or WARP_VECTOR, {"threads": schedule.threads, "spread": 0}


def _check_schedule(
    schedule: RowSchedule, rows: int, columns: int, lanes: int, vector: int, sizes: Sequence[int]
) -> None:
    """Raises `ValueError` if the schedule does not fit the rows."""
    direct, each = schedule.stages == 0, schedule.rows_per_warp
    if each:
        if lanes != WARPGROUP or schedule.members > 1 or not direct or not schedule.hold:
            raise ValueError(f"rows of {columns} columns and {lanes} lanes do not allow {schedule}.")
        if columns % max(1, vector) or schedule.threads * vector > lanes:
            raise ValueError(f"rows of {columns} columns do not allow {schedule}.")
        if schedule.blocks * schedule.rows_per_block < rows:
            raise ValueError(f"expected blocks for {rows} rows, got {schedule}.")
        return
    if 1 < vector < _LEAST_VECTOR:
        raise ValueError(f"expected 1 or at least {_LEAST_VECTOR} columns a thread, got {schedule}.")
    if not schedule.strips(lanes, vector) or (schedule.cluster > 1 and not direct):
        raise ValueError(
            f"rows of {columns} columns, {lanes} lanes and {vector} columns a thread do not allow {schedule}."
        )
    if schedule.spread and (lanes == WARPGROUP or schedule.cluster > 1 or (schedule.preload and not schedule.hold)):
        raise ValueError(f"rows of {columns} columns and {lanes} lanes do not allow {schedule}.")
    if schedule.ahead and schedule.blocks != rows:
        raise ValueError(f"expected a block or a cluster for each of {rows} rows, got {schedule}.")
    if not direct and any(columns * size % COPY_BYTES for size in sizes):
        raise ValueError(
            f"expected rows of whole {COPY_BYTES} bytes, or stages=0, got {columns} columns of {sizes} bytes."
        )
