"""Row kernels that need the maximum of a row and the sum of its exponentials, on a Hopper GPU.

The 128 threads of a warpgroup are the lanes of `OnlineRowContract`; a warpgroup takes one segment of a row at a time.
`schedule.hopper_online` chooses between three forms:
- registers, for not too many short rows: a warpgroup for each segment, which reads it once, directly, and keeps it;
- ring, for many rows: pieces of rows are copied ahead into shared memory, and the warpgroups of a block take them in
  turns. A first pass takes the statistics, a second one writes results. The second pass begins with the pieces that are
  still in the ring, and goes on with the others from the nearest to the farthest, which the L2 cache is likely to hold:
  a row that fits into the ring is read once, of a longer one only the rest a second time;
- split, for few long rows, which would leave most of the GPU idle: a block for each segment. A first kernel writes the
  statistics, lane by lane, a second one merges them, in every block anew, and writes a segment's results.

How to write a kernel on it (`pallas_kernels/ops/softmax/hopper.py` holds more):

    def finish(row, m, s):                     # numbers, held by every thread
        return m, row.quotient(1, s)

    def step(row, x, m, reciprocal):           # float32 columns
        return (row.product(row.exponential(x - m), reciprocal),)

    (y,) = run_online(finish, x, step, [x.dtype], contract=online_row_contract(x.shape[1]), interpret=False)
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import OnlineRowContract, honour, online_row_contract
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, exponential, fused, logarithm, product, quotient, strided
from pallas_kernels.parts.hopper.edge import load_edge, store_edge
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.parts.hopper.tree import combine_lanes
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule, online_schedule, segments_of

Arrays = tuple[jax.Array, ...]
Lanes = tuple[jax.Array, jax.Array]  # each lane's maximum and sum
Load = Callable[[Any, int], jax.Array]
Finish = Callable[["OnlineRow", jax.Array, jax.Array], tuple[jax.Array, ...]]
Step = Callable[..., Sequence[jax.Array]]

_CHUNK_BLOCKS: Final = OnlineRowContract.chunk


@dataclass(frozen=True)
class OnlineRow:
    """The row that a kernel works on, and what may be done with its numbers and columns.

    Attributes:
        index: Its number.
        source: The array of all rows.
        given: (M, 1) arrays that the kernel was given.
        numbers: (M, 1) results.
        writes_numbers: Whether this block is the one to write the row's numbers.
        interpret: Whether the interpreter runs the kernel.
    """

    index: Any
    source: Any
    given: Sequence[Any]
    numbers: Sequence[Any]
    writes_numbers: Any
    interpret: Any

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies columns, numbers, or columns and a number; rounded, never part of a fused multiply-add."""
        return product(jnp.asarray(a), jnp.asarray(b), self.interpret)

    def quotient(self, a: float | jax.Array, b: float | jax.Array) -> jax.Array:
        """Divides two numbers, correctly rounded."""
        return quotient(jnp.float32(a), jnp.float32(b), self.interpret)

    def exponential(self, x: jax.Array, *, exact: bool = False) -> jax.Array:
        """Returns exp(x); see `pallas_kernels.parts.hopper.arithmetic`."""
        return exponential(x, self.interpret, exact=exact)

    def logarithm(self, x: jax.Array) -> jax.Array:
        """Returns the natural logarithm of a number."""
        return logarithm(x)

    def spread(self, number: jax.Array, columns: jax.Array) -> jax.Array:
        """Returns a float32 number in the shape and layout of columns (or as it is beside a number)."""
        if not columns.shape:
            return number
        wide = jnp.broadcast_to(number, columns.shape)
        return wide if self.interpret else plgpu.layout_cast(wide, strided(columns.shape[0]))

    def known(self, number: int) -> jax.Array:
        """Returns one of the row's numbers that the kernel was given."""
        value: jax.Array = self.given[number][self.index, 0]
        return value

    def pick(self, column: jax.Array) -> jax.Array:
        """Returns the row's element in a column, as float32."""
        value: jax.Array = self.source[self.index, column]
        return value.astype(jnp.float32)

    def put(self, number: int, value: jax.Array) -> None:
        """Writes one of the row's numbers."""

        def write() -> None:
            self.numbers[number][self.index, 0] = value

        if self.writes_numbers is True:
            write()
        else:
            pl.when(self.writes_numbers)(write)


@in_32_bits
def run_online(
    finish: Finish,
    x: jax.Array,
    step: Step | None = None,
    results: Sequence[Any] = (),
    *,
    contract: OnlineRowContract,
    given: Sequence[jax.Array] = (),
    numbers: int = 0,
    interpret: Any,
    schedule: OnlineSchedule | None = None,
) -> Arrays:
    """Runs a kernel on the statistics of rows, in the order of a contract.

    Args:
        finish: Maps the row, its maximum m and the sum s of exp(x - m) to numbers for `step`, and puts the row's
            numbers. Where the maximum is not finite s is the sum of exp(x).
        x: (M, C), C at least 1.
        step: Maps the row, float32 columns of it and the numbers of `finish` to one array for each result; None if
            nothing as wide as the row is to be written.
        results: Dtypes of the (M, C) results of `step`.
        contract: Order of the sum, `online_row_contract(C)`.
        given: (M, 1) arrays, numbers for each row.
        numbers: How many (M, 1) float32 results `finish` puts.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How to feed the rows; chosen from the shape by default. No schedule changes a bit.

    Returns:
        The results, then the numbers.

    Raises:
        UnsupportedError: If the contract is another one.
    """
    m, c = x.shape
    honour("statistics of rows", contract, online_row_contract(c))
    out = [jax.ShapeDtypeStruct((m, c), d) for d in results] + [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * numbers
    if m == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    if schedule is None:
        schedule = online_schedule(m, c, x.dtype.itemsize)
    segments = _Parts.of(c, contract.segment)
    run = _Run(m, c, segments, finish, step, len(results), schedule, interpret)
    form = {"ring": run.ring, "registers": run.registers, "split": run.split}[schedule.form]
    return form(x, given, out)


@dataclass(frozen=True)
class _Parts:
    """A row (or a piece of one) cut into parts: `count` - 1 of `size` columns and one of `last`."""

    count: int
    size: int
    last: int

    @classmethod
    def of(cls, columns: int, size: int) -> "_Parts":
        count = segments_of(columns, size)
        return cls(count, size, columns - (count - 1) * size)

    def at(self, part: Any, body: Callable[[int], None], wanted: Any = True) -> None:
        """Calls `body` with the columns of a part, which it needs as a constant."""
        if self.count == 1 or self.last == self.size:
            body(self.last) if wanted is True else pl.when(wanted)(functools.partial(body, self.last))
            return
        pl.when(wanted & (part < self.count - 1))(functools.partial(body, self.size))
        pl.when(wanted & (part == self.count - 1))(functools.partial(body, self.last))


@dataclass(frozen=True)
class _Run:
    """One call: its shape, what to compute, and how to feed it."""

    rows: int
    columns: int
    segments: _Parts
    finish: Finish
    step: Step | None
    results: int
    schedule: OnlineSchedule
    interpret: Any

    def registers(self, x: jax.Array, given: Sequence[jax.Array], out: Sequence[Any]) -> Arrays:
        """A block for each row, a warpgroup for each of its segments."""
        parts, interpret = self.segments, self.interpret

        def kernel(source: Any, *refs: Any) -> None:
            known, written, (scratch, *rest) = _sort(refs, len(given), len(out))
            index = lax.axis_index("row")
            part = lax.axis_index("warpgroup") if parts.count > 1 else 0
            row = OnlineRow(index, source, known, written[self.results :], _first(part, parts.count), interpret)

            def body(columns: int) -> None:
                blocks = self._read(row, part * parts.size, columns)
                lanes = _segment_of_blocks(blocks, interpret)
                if rest:
                    shared, meeting = rest
                    shared[0, part], shared[1, part] = lanes
                    plgpu.barrier_arrive(meeting)
                    plgpu.barrier_wait(meeting)
                    lanes = _merge([(shared.at[0, p], shared.at[1, p]) for p in range(parts.count)], interpret)
                constants = self.finish(row, *_combine(lanes, scratch.at[part], interpret))
                self._write(row, written, part * parts.size, columns, blocks, constants)

            parts.at(part, body)

        memory: list[Any] = [plgpu.SMEM((parts.count, 2, WARPGROUP), jnp.float32)]
        if parts.count > 1:
            memory += [plgpu.SMEM((2, parts.count, WARPGROUP), jnp.float32), plgpu.Barrier(num_arrivals=parts.count)]
        return self._launch(kernel, out, {"row": self.rows}, memory, parts.count)(x, *given)

    def split(self, x: jax.Array, given: Sequence[jax.Array], out: Sequence[Any]) -> Arrays:
        """A block for each segment of each row, in two kernels."""
        parts, interpret = self.segments, self.interpret

        def statistics(source: Any, lanes: Any) -> None:
            index, part = lax.axis_index("row"), lax.axis_index("part")
            row = OnlineRow(index, source, [], [], False, interpret)

            def take(columns: int) -> None:
                blocks = self._read(row, part * parts.size, columns)
                lanes[index, 0, part], lanes[index, 1, part] = _segment_of_blocks(blocks, interpret)

            parts.at(part, take)

        def results(source: Any, lanes: Any, *refs: Any) -> None:
            known, written, (scratch,) = _sort(refs, len(given), len(out))
            index, part = lax.axis_index("row"), lax.axis_index("part")
            row = OnlineRow(index, source, known, written[self.results :], _first(part, parts.count), interpret)

            def body(columns: int) -> None:
                blocks = [] if self.step is None else self._read(row, part * parts.size, columns)
                pairs = [(lanes.at[index, 0, p], lanes.at[index, 1, p]) for p in range(parts.count)]
                constants = self.finish(row, *_combine(_merge(pairs, interpret), scratch, interpret))
                self._write(row, written, part * parts.size, columns, blocks, constants)

            body(0) if self.step is None else parts.at(part, body)

        # The last axis of the grid is the long one: the others end at 65535.
        each = {"part": parts.count, "row": self.rows}
        merged = each if self.step is not None else {"part": 1, "row": self.rows}
        lanes = jax.ShapeDtypeStruct((self.rows, 2, parts.count, WARPGROUP), jnp.float32)
        (found,) = self._launch(statistics, [lanes], each, [])(x)
        scratch = [plgpu.SMEM((2, WARPGROUP), jnp.float32)]
        return self._launch(results, out, merged, scratch)(x, found, *given)

    def ring(self, x: jax.Array, given: Sequence[jax.Array], out: Sequence[Any]) -> Arrays:
        """Blocks that walk through many rows, pieces of which are copied ahead into shared memory."""
        interpret, segments = self.interpret, self.segments
        warpgroups, stages = self.schedule.warpgroups, self.schedule.stages
        blocks = min(self.schedule.blocks, self.rows)
        pieces = _Parts.of(self.columns, self.schedule.piece)
        self._check_pieces(pieces)
        again = 0 if self.step is None else max(0, pieces.count - stages)  # pieces that the second pass reads anew
        fetches = pieces.count + again

        def kernel(source: Any, *refs: Any) -> None:
            known, written, (scratch, barriers, ring, *rest) = _sort(refs, len(given), len(out))
            shared, *meeting = rest or [None]
            first_row = lax.axis_index("block")
            warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
            rows = lax.div(self.rows - first_row + blocks - 1, blocks)

            def fetch(position: Any) -> None:
                """Starts the copy that comes at a position of this block's sequence, if there is one."""
                order = lax.rem(position, fetches)
                piece = jnp.where(order < pieces.count, order, fetches - 1 - order) if again else order
                row = first_row + lax.div(position, fetches) * blocks
                slot = lax.rem(position, stages)

                def copy(columns: int) -> None:
                    # In bounds, a contiguous piece is one instruction without a descriptor, of any length.
                    plgpu.copy_gmem_to_smem(
                        source.at[row, pl.ds(piece * pieces.size, columns)],
                        ring.at[slot, pl.ds(0, columns)],
                        barriers.at[slot],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                    )

                pieces.at(piece, copy, position < rows * fetches)

            def wait(position: Any) -> None:
                plgpu.barrier_wait(barriers.at[lax.rem(position, stages)])

            def release(position: Any) -> None:
                plgpu.commit_smem()  # every thread of the warpgroup has read the piece
                fetch(position + stages)

            def load_from(position: Any, start: Any = 0) -> Load:
                slot = lax.rem(position, stages)
                return lambda offset, width: _load(ring.at[slot, pl.ds(start + offset, width)], width)

            def each(first: Any, count: Any, body: Callable[[Any], None]) -> None:
                """Walks through the positions from `first` on that this warpgroup takes; each has slots of its own."""
                skipped = lax.rem(warpgroup - lax.rem(first, warpgroups) + warpgroups, warpgroups)
                mine = lax.div(count - skipped + warpgroups - 1, warpgroups)
                pl.loop(0, mine)(lambda i: body(first + skipped + i * warpgroups))

            each(0, stages, fetch)

            def statistics(i: Any) -> Lanes:
                """First pass over the i-th row."""
                start = i * fetches
                if segments.count == 1:
                    wait(start)
                    lanes = _segment(load_from(start), segments.last, interpret)
                    if self.step is None:
                        release(start)
                    return lanes

                def take(position: Any) -> None:
                    piece = position - start
                    wait(position)

                    def keep(columns: int) -> None:
                        parts = _Parts.of(columns, segments.size)
                        before = piece * (pieces.size // segments.size) if pieces.count > 1 else 0

                        def one(part: Any, columns: int) -> None:
                            lanes = _segment(load_from(position, part * parts.size), columns, interpret)
                            shared[0, before + part], shared[1, before + part] = lanes

                        if parts.count > 1:
                            pl.loop(0, parts.count - 1)(lambda part: one(part, parts.size))
                        one(parts.count - 1, parts.last)

                    pieces.at(piece, keep)
                    if self.step is None:
                        release(position)
                    elif again:
                        pl.when(piece < again)(functools.partial(release, position))

                if meeting:
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(meeting[1]))  # all have merged the row before
                each(start, pieces.count, take)
                if meeting:
                    plgpu.barrier_arrive(meeting[0])
                    plgpu.barrier_wait(meeting[0])
                total = _merge([(shared.at[0, p], shared.at[1, p]) for p in range(segments.count)], interpret)
                if meeting:
                    pl.when(i < rows - 1)(lambda: plgpu.barrier_arrive(meeting[1]))
                return total

            @pl.loop(0, rows)
            def _(i: Any) -> None:
                others, is_first = written[self.results :], _first(warpgroup, warpgroups)
                row = OnlineRow(first_row + i * blocks, source, known, others, is_first, interpret)
                start = i * fetches
                constants = self.finish(row, *_combine(statistics(i), scratch.at[warpgroup], interpret))
                if self.step is None:
                    return

                def write(piece: Any, position: Any) -> None:
                    load = load_from(position)
                    pieces.at(piece, lambda n: self._emit(row, load, written, piece * pieces.size, n, constants))
                    release(position)

                def write_again(position: Any) -> None:
                    wait(position)
                    write(fetches - 1 - (position - start), position)

                each(start + again, pieces.count - again, lambda position: write(position - start, position))
                if again:
                    each(start + pieces.count, again, write_again)

        return self._launch(kernel, out, {"block": blocks}, self._ring_memory(pieces, x.dtype), warpgroups)(x, *given)

    def _check_pieces(self, pieces: _Parts) -> None:
        """Raises `ValueError` if the schedule does not fit the row."""
        if (
            self.schedule.stages % self.schedule.warpgroups
            or self.schedule.warpgroups > pieces.count
            or (pieces.count > 1 and pieces.size % self.segments.size)
        ):
            raise ValueError(
                f"expected stages a multiple of warpgroups, at most one warpgroup a piece and whole segments of"
                f" {self.segments.size} columns in a piece, got {self.schedule} for {pieces.count} pieces."
            )

    def _ring_memory(self, pieces: _Parts, dtype: Any) -> list[Any]:
        """Returns the types of `ring`'s shared memory and barriers."""
        warpgroups, stages = self.schedule.warpgroups, self.schedule.stages
        capacity = -(-max(pieces.last, pieces.size if pieces.count > 1 else 0) // WARPGROUP) * WARPGROUP
        memory: list[Any] = [
            plgpu.SMEM((warpgroups, 2, WARPGROUP), jnp.float32),
            plgpu.Barrier(num_barriers=stages),
            plgpu.SMEM((stages, capacity), dtype),
        ]
        if self.segments.count > 1:
            memory.append(plgpu.SMEM((2, self.segments.count, WARPGROUP), jnp.float32))
        if warpgroups > 1:
            memory += [plgpu.Barrier(num_arrivals=warpgroups)] * 2
        return memory

    def _launch(
        self, kernel: Any, out: Sequence[Any], grid: dict[str, int], memory: list[Any], warpgroups: int = 1
    ) -> Callable[..., Arrays]:
        launch = plgpu.kernel(
            kernel,
            out_type=list(out),
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            kernel_name=profile_name(self.finish),
            num_threads=warpgroups,
            thread_name="warpgroup",
            scratch_types=memory,
            # Every array has its layout from its load; the other semantics would infer them, ten times as long.
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
            interpret=self.interpret,
        )
        return lambda *arrays: tuple(launch(*arrays))

    def _read(self, row: OnlineRow, first: Any, columns: int) -> list[jax.Array]:
        """Returns the columns from `first` on in blocks of 128, the last one filled up with -inf."""
        whole, rest = divmod(columns, WARPGROUP)
        starts = (first + i * WARPGROUP for i in range(whole))
        blocks = [_load(row.source.at[row.index, pl.ds(start, WARPGROUP)], WARPGROUP) for start in starts]
        if rest:
            blocks.append(load_edge(row.source.at[row.index], first + whole * WARPGROUP, rest, self.interpret))
        return blocks

    def _write(
        self,
        row: OnlineRow,
        written: Sequence[Any],
        first: Any,
        columns: int,
        blocks: Sequence[jax.Array],
        constants: Arrays,
    ) -> None:
        """Writes the results of blocks of columns."""
        if self.step is None:
            return
        for i, block in enumerate(blocks):
            start, valid = first + i * WARPGROUP, min(WARPGROUP, columns - i * WARPGROUP)
            values = self.step(row, block, *constants)
            for result, value in zip(written[: self.results], values, strict=True):
                rounded = value.astype(result.dtype)
                if valid < WARPGROUP:
                    store_edge(result.at[row.index], start, valid, rounded, self.interpret)
                else:
                    result[row.index, pl.ds(start, WARPGROUP)] = rounded

    def _emit(
        self, row: OnlineRow, load: Load, written: Sequence[Any], first: Any, columns: int, constants: Arrays
    ) -> None:
        """Writes the results of a piece of `columns` columns that begins at column `first`."""
        step = self.step
        if step is None:
            return

        def write(offsets: Sequence[Any], width: int) -> None:
            # All loads first: the compiler moves none of them across a store.
            loaded = [load(offset, width) for offset in offsets]
            for offset, columns in zip(offsets, loaded, strict=True):
                values = step(row, columns, *constants)
                for result, value in zip(written[: self.results], values, strict=True):
                    result[row.index, pl.ds(first + offset, width)] = value.astype(result.dtype)

        width, done, unroll = WARPGROUP * self.schedule.vector, 0, self.schedule.unroll
        while width >= WARPGROUP:
            blocks = (columns - done) // width
            groups = blocks // unroll if blocks > unroll else 0

            def group(i: Any, _: None, width: int = width, done: int = done) -> None:
                write([done + (i * unroll + j) * width for j in range(unroll)], width)

            if groups:
                lax.fori_loop(0, groups, group, None)
            write([done + j * width for j in range(groups * unroll, blocks)], width)
            done += blocks * width
            width //= 2
        if done < columns:
            # The last block ends where the row ends; what it shares with the block before is written twice.
            write([columns - WARPGROUP], WARPGROUP)


def _chunk(lanes: Lanes | None, blocks: Sequence[jax.Array], interpret: Any) -> Lanes:
    """Returns the statistics of each lane after another chunk."""
    largest = functools.reduce(jnp.maximum, blocks if lanes is None else [lanes[0], *blocks])
    shift = _finite(largest)
    added = functools.reduce(jnp.add, [exponential(block - shift, interpret) for block in blocks])
    if lanes is None:
        return largest, added
    return largest, fused(lanes[1], exponential(lanes[0] - shift, interpret), added, interpret)


def _segment_of_blocks(blocks: Sequence[jax.Array], interpret: Any) -> Lanes:
    """Returns the statistics of each lane in a segment that is held in registers."""
    lanes = _chunk(None, blocks[:_CHUNK_BLOCKS], interpret)
    for start in range(_CHUNK_BLOCKS, len(blocks), _CHUNK_BLOCKS):
        lanes = _chunk(lanes, blocks[start : start + _CHUNK_BLOCKS], interpret)
    return lanes


def _segment(load: Load, columns: int, interpret: Any) -> Lanes:
    """Returns the statistics of each lane in a segment that lies in shared memory."""

    def chunk(lanes: Lanes | None, offset: Any, width: int) -> Lanes:
        blocks = [load(offset + start, WARPGROUP) for start in range(0, width, WARPGROUP)]
        if width % WARPGROUP:
            lane = lax.iota(jnp.int32, WARPGROUP)
            lane = lane if interpret else plgpu.layout_cast(lane, strided(WARPGROUP))
            blocks[-1] = jnp.where(lane < width % WARPGROUP, blocks[-1], -jnp.inf)
        return _chunk(lanes, blocks, interpret)

    width = _CHUNK_BLOCKS * WARPGROUP
    whole, rest = divmod(columns, width)
    if not whole:
        return chunk(None, 0, rest)
    lanes = chunk(None, 0, width)
    if whole > 1:
        lanes = lax.fori_loop(1, whole, lambda i, lanes: chunk(lanes, i * width, width), lanes)
    return chunk(lanes, whole * width, rest) if rest else lanes


def _merge(segments: Sequence[tuple[Any, Any]], interpret: Any) -> Lanes:
    """Returns the statistics of each lane in all segments; each segment is a pair of references."""
    maxima = [_load(maximum, WARPGROUP) for maximum, _ in segments]
    sums = [_load(total, WARPGROUP) for _, total in segments]
    largest = functools.reduce(jnp.maximum, maxima)
    shift = _finite(largest)
    weights = [exponential(maximum - shift, interpret) for maximum in maxima]
    total = product(sums[0], weights[0], interpret)
    for added, weight in zip(sums[1:], weights[1:], strict=True):
        total = fused(added, weight, total, interpret)
    return largest, total


def _combine(lanes: Lanes, scratch: Any, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum and the sum of all lanes."""
    largest = combine_lanes(lanes[0], scratch.at[0], "max", interpret)
    weight = exponential(lanes[0] - _finite(largest), interpret)
    return largest, combine_lanes(product(lanes[1], weight, interpret), scratch.at[1], "add", interpret)


def _finite(maximum: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(maximum) < jnp.inf, maximum, 0.0)


def _first(part: Any, count: int) -> Any:
    return part == 0 if count > 1 else True


def _load(window: Any, width: int) -> jax.Array:
    return plgpu.load(window, layout=strided(width)).astype(jnp.float32)


def _sort(refs: Sequence[Any], given: int, out: int) -> tuple[list[Any], list[Any], list[Any]]:
    left = iter(refs)
    return list(itertools.islice(left, given)), list(itertools.islice(left, out)), list(left)
