"""The engine of the row kernels on a Hopper GPU.

A row program reads its row in passes: a fold combines what a step makes of every column, in the order of `RowContract`;
`emit` writes results that are as wide as the row. The engine feeds the passes. One to eight warpgroups (a team) share
a row; each has its own lanes, and each of its threads 4 or 8 neighbouring ones. The rows of a block come one after the
other, from a ring of stages in shared memory into which they are copied ahead, or straight from memory. A row that
fits into the ring or into the team's registers is read from memory once, a longer one once per pass.

How to write a kernel on it (`pallas_kernels/ops/norm/hopper.py` holds more):

    def program(row):
        square = row.fold(lambda x: row.product(x, x))
        factor = row.quotient(1, row.square_root(row.quotient(square, columns) + eps))
        row.put(0, factor)                                    # one number for the row
        row.emit(lambda x, w: (row.product(row.product(x, factor), w),))     # rounded to the dtype of the result

    y, factor = run_rows(program, [x], [weight], [x.dtype], numbers=1, interpret=False)

Steps get float32 columns, some multiple of 128; the arrays first, then the vectors. They must treat every column on
its own. Columns of more than a row's length are masked by the engine. A product that a sum or difference may follow
goes through `row.product`, a division or root of numbers through `row.quotient` and `row.square_root`: then every step
is rounded correctly, on the GPU and under the interpreter.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import row_contract
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, larger, product, quotient, square_root
from pallas_kernels.parts.hopper.launch import launch as launch_kernel
from pallas_kernels.parts.hopper.pieces import Pieces
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.parts.hopper.row_launch import COLUMN_NUMBERS as COLUMN_NUMBERS
from pallas_kernels.parts.hopper.row_launch import Launch, Place, PlaceOf
from pallas_kernels.parts.hopper.row_launch import Parted as Parted
from pallas_kernels.parts.hopper.row_launch import Picked as Picked
from pallas_kernels.parts.hopper.strip import Strip
from pallas_kernels.parts.hopper.team import Team, combine_team
from pallas_kernels.parts.hopper.tree import Fold
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.rows import COPY_BYTES, RowSchedule, row_schedule, row_vector

Arrays = tuple[jax.Array, ...]
Program = Callable[[Any], None]


_ALIGN: Final = 16  # bytes to which the copy engine aligns rows
_BATCH: Final = 8  # strips on their way from memory while results are written


NEEDS: Final = "rows of at least 128 columns, of whole 16 bytes in every dtype"
"""What `supports` asks, in words."""


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether the engine takes rows (and vectors) of `columns` columns of these dtypes."""
    return columns >= WARPGROUP and all(columns * jnp.dtype(d).itemsize % _ALIGN == 0 for d in dtypes)


class _Counter:
    """Stands in for a row while the passes of a program are counted."""

    def __init__(self) -> None:
        self.passes = 0
        self.folds = 0
        self.exchanges = 0

    def fold(self, *_: Any, combine: Any = "add", **__: Any) -> Any:
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


class Row:
    """The row that a program works on."""

    def __init__(self, launch: Launch, index: Any, number: Any) -> None:
        self._launch = launch
        self._index = index
        self._number = number
        self._passes = 0
        self._exchanges = 0
        self._held: dict[Any, list[jax.Array]] = {}
        self._derived: dict[Any, list[jax.Array]] = {}
        self._steps: list[tuple[Callable[..., Sequence[jax.Array]], Sequence[int]]] = []
        places = (place for _, place in (*launch.sources, *launch.vectors) if place is not None)
        self._places = {place: place(self) for place in dict.fromkeys(places)}  # in a fixed order: a set has none

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies columns, numbers, or columns and a number; rounded, never part of a fused multiply-add."""
        return product(jnp.asarray(a), jnp.asarray(b), self._launch.team.interpret)

    def quotient(self, a: float | jax.Array, b: float | jax.Array) -> jax.Array:
        """Divides two numbers, correctly rounded."""
        return quotient(jnp.float32(a), jnp.float32(b), self._launch.team.interpret)

    def square_root(self, a: jax.Array) -> jax.Array:
        """Takes the root of a number, correctly rounded."""
        return square_root(a, self._launch.team.interpret)

    @property
    def index(self) -> Any:
        """Number of the row."""
        return self._index

    @property
    def interpret(self) -> Any:
        """Whether the interpreter runs the kernel."""
        return self._launch.team.interpret

    def given(self, number: int, column: int = 0) -> jax.Array:
        """Returns one of the row's numbers that the kernel was given."""
        return self._launch.given[number][self._index, column]

    def derive(self, step: Callable[..., Sequence[jax.Array]], *, vectors: Sequence[int] = ()) -> None:
        """Puts what a step makes of every column in the place of the arrays, once, for all passes that follow.

        Rows that are held in registers are held so; of others every pass computes them again.

        Args:
            step: Maps float32 arrays of one width, one for each array and each named vector, to any number of arrays.
            vectors: Which of the vectors the step is given.
        """
        self._steps.append((step, vectors))

    def put(self, number: int, value: jax.Array) -> None:
        """Writes one of the row's numbers."""

        @self._launch.once
        def _() -> None:
            self._launch.numbers[number][self._index, 0] = value

    def fold(
        self,
        step: Callable[..., Any],
        *,
        combine: Fold | Sequence[Fold] = "add",
        unit: float = 0.0,
        vectors: Sequence[int] = (),
    ) -> Any:
        """Combines what a step makes of every column.

        Args:
            step: Maps float32 arrays of one width, one for each array and each named vector, to such an array, or to a
                tuple of them if several are combined in one pass.
            combine: "add", "max" (the larger; any number or nan where there is a nan), "greatest" (nan where there is
                one) or "largest" (the same of numbers that are not negative); one of the first two in a tuple.
            unit: What stands for the columns that the last block lacks.
            vectors: Which of the vectors the step is given.

        Returns:
            A float32 number, or a tuple of them.
        """
        launch = self._launch
        kinds: tuple[Fold, ...] = (combine,) if isinstance(combine, str) else tuple(combine)

        def take(totals: Any, places: Sequence[Place]) -> Any:
            for place in places:
                found = []
                for i, strip in enumerate(launch.strips(place)):
                    values = step(*self._load(place, i, strip, vectors))
                    values = (values,) if isinstance(combine, str) else tuple(values)
                    values = tuple(strip.mask(v, unit, launch.team.interpret) for v in values)
                    if totals is not None:
                        values = tuple(
                            self._join(kind, t, v) for kind, t, v in zip(kinds, totals[i], values, strict=True)
                        )
                    found.append(values)
                totals = tuple(found)
            return totals

        totals = self._walk(take, None)
        by_kind = [[strip[i] for strip in totals] for i in range(len(kinds))]
        places = [self._place(i) for i in range(len(kinds))]
        self._exchanges += len(kinds)
        if self._last:
            launch.team.release()
        numbers = combine_team(kinds, by_kind, launch.lane, launch.team, places)
        self._leave(met=True)
        return numbers[0] if isinstance(combine, str) else numbers

    def emit(self, step: Callable[..., Sequence[jax.Array]], *, vectors: Sequence[int] | None = None) -> None:
        """Writes the results that are as wide as the row.

        Args:
            step: Maps float32 arrays of one width, one for each array and each vector, to one for each result, or to
                one for each part of a `Parted` one.
            vectors: Which of the vectors the step is given; all by default.
        """
        launch = self._launch
        wanted = range(len(launch.vectors)) if vectors is None else vectors

        def write(carry: None, places: Sequence[Place]) -> None:
            strips = [(place, i, strip) for place in places for i, strip in enumerate(launch.strips(place))]
            for batch in itertools.batched(strips, _BATCH):
                # The compiler moves no load across a store, so loads come first, to be on their way together.
                loaded = [self._load(place, i, strip, wanted) for place, i, strip in batch]
                for (place, _, strip), columns in zip(batch, loaded, strict=True):
                    shifted = replace(strip, block=place.column(launch), columns=launch.columns)
                    values = iter(step(*columns))
                    for result, parted in launch.results:
                        for part in range(parted.parts):
                            row, value = parted.row(self._index, part), next(values).astype(result.dtype)
                            shifted.store(result, row, value, launch.team.interpret)

        self._walk(write, None)
        self._leave(met=False)

    def _join(self, kind: Fold, total: jax.Array, value: jax.Array) -> jax.Array:
        if kind in ("greatest", "largest"):
            return larger(total, value, self.interpret)
        return total + value if kind == "add" else jnp.where(total > value, total, value)

    def _place(self, exchange: int) -> Any:
        # A row with one exchange takes turns with the next row; with more, one waits for the other anyway.
        if self._launch.folds > 1:
            return self._exchanges + exchange
        return self._exchanges + exchange + lax.rem(self._number, 2) * self._launch.exchanges

    def _load(self, place: Place, number: int, strip: Strip, vectors: Sequence[int]) -> list[jax.Array]:
        """Returns a strip of every array, or of what was derived from them, and of some vectors."""
        columns = [
            *self._columns(len(self._steps), place, number, strip),
            *self._vectors(vectors, place, number, strip),
        ]
        return [x.astype(jnp.float32) for x in columns]

    def _columns(self, steps: int, place: Place, number: int, strip: Strip) -> list[jax.Array]:
        """Returns a strip of what so many steps derive from the arrays."""
        if not steps:
            return self._read(place, number, strip)
        key = (steps, place.piece, place.block, number) if self._launch.schedule.hold else None
        if key is not None and key in self._derived:
            return self._derived[key]
        step, vectors = self._steps[steps - 1]
        given = [*self._columns(steps - 1, place, number, strip), *self._vectors(vectors, place, number, strip)]
        columns = list(step(*(x.astype(jnp.float32) for x in given)))
        if key is not None:
            self._derived[key] = columns
        return columns

    def _read(self, place: Place, number: int, strip: Strip) -> list[jax.Array]:
        """Returns a strip of every array, from registers where it has been read before and is held."""
        launch = self._launch
        key = (place.piece, place.block, number) if launch.schedule.hold else None
        if key is not None and key in self._held:
            return self._held[key]
        if launch.ring:
            columns = [strip.load(array, place.slot, self.interpret) for array in launch.ring]
        else:
            columns = [strip.load(array, self._at_place(at), self.interpret) for array, at in launch.sources]
        if key is not None:
            self._held[key] = columns
        return columns

    def _vectors(self, wanted: Sequence[int], place: Place, number: int, strip: Strip) -> list[jax.Array]:
        return [self._launch.load_vector(v, self._row_of_vector(v), place, number, strip) for v in wanted]

    def _row_of_vector(self, number: int) -> Any:
        return None if number == COLUMN_NUMBERS else self._at_place(self._launch.vectors[number][1], shared=True)

    def _at_place(self, place: PlaceOf | None, *, shared: bool = False) -> Any:
        """Returns which row of an array this row reads; None for a vector that has no rows."""
        if place is None:
            return None if shared else self._index
        return self._places[place]

    def _walk(self, visit: Callable[[Any, Sequence[Place]], Any], carry: Any) -> Any:
        """Visits the blocks of the row, upwards."""
        launch, pieces = self._launch, self._launch.pieces
        self._passes += 1
        if launch.schedule.hold:
            if self._passes == 1 and not launch.ring:
                # All of the row is on its way before the first column is worked on.
                for block in range(0, launch.columns, launch.lanes):
                    place = Place(0, block, None, launch.columns, block + launch.lanes <= launch.columns)
                    for i, strip in enumerate(launch.strips(place)):
                        self._read(place, i, strip)
            for piece in range(pieces.count):
                carry = self._walk_piece(visit, carry, piece, pieces.last if piece == pieces.count - 1 else pieces.size)
            return carry
        if pieces.count > 1:
            carry = self._walk_piece(visit, carry, 0, pieces.size)
            if pieces.count > 2:
                carry = lax.fori_loop(
                    1, pieces.count - 1, lambda i, carry: self._walk_piece(visit, carry, i, pieces.size), carry
                )
        return self._walk_piece(visit, carry, pieces.count - 1, pieces.last)

    def _walk_piece(self, visit: Callable[[Any, Sequence[Place]], Any], carry: Any, piece: Any, columns: int) -> Any:
        launch, lanes = self._launch, self._launch.lanes
        place = functools.partial(Place, piece, slot=self._open(piece), columns=columns)
        whole, unroll = columns // lanes, launch.schedule.unroll
        if launch.schedule.hold:
            unroll = whole + 1
        groups = whole // unroll if whole > unroll else 0

        def group(i: Any, carry: Any) -> Any:
            return visit(carry, [place(block=(i * unroll + j) * lanes, whole=True) for j in range(unroll)])

        begun = 0
        if groups and carry is None:
            carry, begun = group(0, None), 1
        if begun < groups:
            carry = lax.fori_loop(begun, groups, group, carry)
        left = [place(block=j * lanes, whole=True) for j in range(groups * unroll, whole)]
        if columns % lanes:
            left.append(place(block=whole * lanes, whole=False))
        if left:
            carry = visit(carry, left)
        if launch.ring and not launch.kept:
            launch.team.release()
            launch.team.meet()
            launch.fetch(self._at(piece) + launch.schedule.stages)
        return carry

    def _at(self, piece: Any) -> Any:
        """Returns the position of a piece in the sequence of this block's fetches."""
        before = 0 if self._launch.kept else (self._passes - 1) * self._launch.pieces.count
        return self._number * self._launch.fetches + before + piece

    def _open(self, piece: Any) -> Any:
        launch = self._launch
        if not launch.ring:
            return None
        slot = lax.rem(self._at(piece), launch.schedule.stages)
        if self._passes == 1 or not launch.kept:
            plgpu.barrier_wait(launch.barriers.at[slot])
        return slot

    @property
    def _last(self) -> bool:
        """Whether this pass is the last one to read a row that lies in the ring as a whole."""
        launch = self._launch
        return bool(launch.ring) and launch.kept and self._passes == (1 if launch.schedule.hold else launch.passes)

    def _leave(self, met: bool) -> None:
        """Fetches a later row into the place of this one, if no pass will read it there any more."""
        launch = self._launch
        if self._last:
            if not met:
                launch.team.release()
                launch.team.meet()
            first = self._at(0) + launch.schedule.stages
            pl.loop(0, launch.pieces.count)(lambda i: launch.fetch(first + i))


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
) -> Arrays:
    """Runs a row program.

    Args:
        program: Is called with a `Row`.
        rows: (M, C) arrays that `supports` allows, or `Picked` ones.
        vectors: (C,) arrays that `supports` allows, shared by all rows, or `Picked` ones.
        results: Dtypes of the (M, C) results of `emit`, or `Parted` ones.
        given: (M, N) arrays, numbers for each row.
        numbers: How many (M, 1) float32 results the program puts.
        count: M, where the first array is picked.
        lanes: Lanes of a block, a power of two, for programs whose folds give the same in any order; by default those
            of `RowContract`.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How to feed the rows; chosen from the shape by default. No schedule changes a bit.
        name: What the kernel is called in a profile; by default after the function that the program is written in.

    Returns:
        The results, then the numbers.
    """
    sources, shared = ([x if isinstance(x, Picked) else Picked(x, None) for x in group] for group in (rows, vectors))
    m, c = (sources[0].array.shape[0] if count is None else count), sources[0].array.shape[1]
    wanted = [d if isinstance(d, Parted) else Parted(d) for d in results]
    out = [jax.ShapeDtypeStruct((m * w.parts, c), w.dtype) for w in wanted]
    out += [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * numbers
    if m == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    counter = _Counter()
    jax.eval_shape(lambda: program(counter))
    lanes = row_contract().lanes(c) if lanes is None else lanes
    sizes = tuple(x.array.dtype.itemsize for x in sources)
    wide_sizes = tuple(jnp.dtype(w.dtype).itemsize for w in wanted)
    if schedule is None:
        apart = any(x.place is not None for x in (*sources, *shared))
        schedule = row_schedule(m, c, lanes, sizes, wide_sizes, len(vectors), counter.passes, picked=apart)
    vector = row_vector(lanes, (*sizes, *wide_sizes))
    schedule = replace(schedule, blocks=min(schedule.blocks, m))
    _check_schedule(schedule, c, lanes, vector, sizes)
    direct = schedule.stages == 0
    pieces = Pieces.of(c, c if direct else schedule.stage)
    blocks, team, cluster = schedule.blocks, schedule.team, schedule.cluster
    exchange = (max(1, counter.exchanges * (2 if counter.folds == 1 else 1)), max(WARPGROUP, lanes // WARPGROUP))
    emulated = bool(interpret) and cluster > 1
    if emulated:
        out.append(jax.ShapeDtypeStruct((blocks, *exchange), jnp.float32))

    def kernel(read: Any, beside: Any, known: Any, *refs: Any) -> None:
        *written, scratch = refs
        first_row = lax.axis_index("block")
        shared_memory = written.pop().at[first_row] if emulated else scratch.exchange
        member = lax.axis_index("member") if team > 1 else 0
        if cluster > 1:
            member += lax.axis_index("part") * team
        launch = Launch(
            sources=[(ref, x.place) for ref, x in zip(read, sources, strict=True)],
            vectors=[(ref, x.place) for ref, x in zip(beside, shared, strict=True)],
            given=known,
            results=list(zip(written[: len(wanted)], wanted, strict=True)),
            numbers=written[len(wanted) :],
            team=Team(lanes, cluster, shared_memory, scratch.meeting, interpret),
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
        if not direct:
            pl.loop(0, schedule.stages)(launch.fetch)
        if schedule.preload:
            launch.preload()
        if blocks == m:
            program(Row(launch, first_row, 0))
            return

        @pl.loop(0, launch.rows)
        def _(i: Any) -> None:
            program(Row(launch, first_row + i * blocks, i))

    run = launch_kernel(
        profile_name(program) if name is None else name,
        kernel,
        out,
        {"block": blocks},
        [_Scratch.of(schedule, pieces, exchange, [x.array.dtype for x in sources], interpret)],
        cluster={"part": cluster} if cluster > 1 else None,
        warpgroups={"member": team} if team > 1 else None,
        by_lanes=True,
        interpret=interpret,
    )
    arrays = ([x.array for x in group] for group in (sources, shared))
    return tuple(run(*arrays, given))[: len(results) + numbers]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        exchange: Where the lanes of a team meet; None where the interpreter has device memory instead.
        meeting: The barrier of the team under the interpreter.
        barriers: A barrier for each stage.
        ring: The stages of each array; none if rows are read straight from memory.
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


def _check_schedule(schedule: RowSchedule, columns: int, lanes: int, vector: int, sizes: Sequence[int]) -> None:
    """Raises `ValueError` if the schedule does not fit the rows."""
    direct = schedule.stages == 0
    if schedule.members * WARPGROUP * vector > lanes or (schedule.cluster > 1 and not direct):
        raise ValueError(
            f"rows of {columns} columns, {lanes} lanes and {vector} columns a thread do not allow {schedule}."
        )
    if not direct and any(columns * size % COPY_BYTES for size in sizes):
        raise ValueError(
            f"expected rows of whole {COPY_BYTES} bytes, or stages=0, got {columns} columns of {sizes} bytes."
        )
