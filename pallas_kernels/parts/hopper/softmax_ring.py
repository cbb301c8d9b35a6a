"""The softmax kernel on a Hopper GPU for many rows, with pieces of rows prefetched into shared memory.

The warpgroups of a block take pieces round-robin, and the warpgroup that has read a piece refills its stage. Unlike
the matmul pipeline there is no producer warpgroup, because there is little to compute.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP
from pallas_kernels.parts.hopper.online_lanes import Lanes, Load, combine, load_columns, merge, of_columns
from pallas_kernels.parts.hopper.online_row import OnlineRow
from pallas_kernels.parts.hopper.pieces import Pieces, copy_piece
from pallas_kernels.parts.hopper.softmax_run import Arrays, Run
from pallas_kernels.schedule.hopper.softmax import segments_of


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        lanes: Scratch for reducing the lanes of each warpgroup.
        full: A barrier for each stage.
        stages: Pieces of rows.
        segments: Statistics of a row's segments, if there are several.
        taken: Barrier that completes when all segments are written; None with one warpgroup.
        merged: Barrier that completes when all warpgroups have read them; None with one warpgroup.
    """

    lanes: Any
    full: Any
    stages: Any
    segments: Any = None
    taken: Any = None
    merged: Any = None


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block: its constants and references.

    Attributes:
        run: The call.
        pieces: How rows are cut.
        source: The array of all rows.
        scratch: Shared memory and barriers.
        blocks: Blocks that are launched.
        first: The block's first row; the others follow with a stride of `blocks`.
        rows: Number of its rows.
        warpgroup: Index of this warpgroup.
    """

    run: Run
    pieces: Pieces
    source: Any
    scratch: _Scratch
    blocks: int
    first: Any
    rows: Any
    warpgroup: Any

    @property
    def again(self) -> int:
        """Pieces that the second pass fetches again."""
        return 0 if self.run.step is None else max(0, self.pieces.count - self.run.schedule.stages)

    @property
    def fetches(self) -> int:
        """Pieces that are fetched for a row."""
        return self.pieces.count + self.again

    def stage(self, position: Any) -> Any:
        """Returns the stage of a position in the block's sequence of pieces."""
        return lax.rem(position, self.run.schedule.stages)

    def fetch(self, position: Any) -> None:
        """Starts the copy at a position of this block's sequence, if it exists."""
        count, fetches = self.pieces.count, self.fetches
        order = lax.rem(position, fetches)
        piece = jnp.where(order < count, order, fetches - 1 - order) if self.again else order
        row = self.first + lax.div(position, fetches) * self.blocks
        slot, wanted = self.stage(position), position < self.rows * fetches
        rings, full = [self.scratch.stages], self.scratch.full
        copy_piece(self.pieces, [self.source], rings, full, row=row, piece=piece, slot=slot, wanted=wanted)

    def wait(self, position: Any) -> None:
        """Waits for the piece at a position."""
        plgpu.barrier_wait(self.scratch.full.at[self.stage(position)])

    def release(self, position: Any) -> None:
        """Releases a stage and starts the next copy into it."""
        plgpu.commit_smem()  # every thread of the warpgroup has read the piece
        self.fetch(position + self.run.schedule.stages)

    def load_from(self, position: Any, start: Any = 0) -> Load:
        """Returns a function that loads columns of the piece at a position, counted from `start`."""
        stage = self.stage(position)
        return lambda offset, width: load_columns(self.scratch.stages.at[stage, pl.ds(start + offset, width)], width)

    def each(self, first: Any, count: Any, body: Callable[[Any], None]) -> None:
        """Loops over this warpgroup's positions from `first` on; warpgroups use disjoint stages."""
        warpgroups = self.run.schedule.warpgroups
        skipped = lax.rem(self.warpgroup - lax.rem(first, warpgroups) + warpgroups, warpgroups)
        mine = lax.div(count - skipped + warpgroups - 1, warpgroups)
        pl.loop(0, mine)(lambda i: body(first + skipped + i * warpgroups))

    def statistics(self, i: Any) -> Lanes:
        """First pass over the i-th row."""
        run, pieces, segments, scratch = self.run, self.pieces, self.run.segments, self.scratch
        start = i * self.fetches
        if segments.count == 1:
            self.wait(start)
            lanes = of_columns(self.load_from(start), segments.last, run.interpret)
            if run.step is None:
                self.release(start)
            return lanes

        def take(position: Any) -> None:
            piece = position - start
            self.wait(position)
            pieces.at(piece, lambda columns: self.keep(piece, position, columns))
            if run.step is None:
                self.release(position)
            elif self.again:
                pl.when(piece < self.again)(functools.partial(self.release, position))

        if scratch.merged is not None:
            pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch.merged))  # all have merged the previous row
        self.each(start, pieces.count, take)
        if scratch.taken is not None:
            plgpu.barrier_arrive(scratch.taken)
            plgpu.barrier_wait(scratch.taken)
        shared = scratch.segments
        total = merge([(shared.at[0, p], shared.at[1, p]) for p in range(segments.count)], run.interpret)
        if scratch.merged is not None:
            pl.when(i < self.rows - 1)(lambda: plgpu.barrier_arrive(scratch.merged))
        return total

    def keep(self, piece: Any, position: Any, columns: int) -> None:
        """Stores the statistics of the segments of a piece."""
        size, shared = self.run.segments.size, self.scratch.segments
        parts = Pieces.of(columns, size, segments_of(columns, size))
        before = piece * (self.pieces.size // size) if self.pieces.count > 1 else 0

        def one(part: Any, columns: int) -> None:
            lanes = of_columns(self.load_from(position, part * parts.size), columns, self.run.interpret)
            shared[0, before + part], shared[1, before + part] = lanes

        if parts.count > 1:
            pl.loop(0, parts.count - 1)(lambda part: one(part, parts.size))
        one(parts.count - 1, parts.last)

    def results(self, start: Any, row: OnlineRow, written: Sequence[Any], constants: Arrays) -> None:
        """Second pass over the row at a position: first the pieces still in shared memory, then the rest in reverse."""
        run, pieces, fetches, again = self.run, self.pieces, self.fetches, self.again

        def write(piece: Any, position: Any) -> None:
            load = self.load_from(position)
            pieces.at(piece, lambda n: run.emit(row, load, written, piece * pieces.size, n, constants))
            self.release(position)

        def write_again(position: Any) -> None:
            self.wait(position)
            write(fetches - 1 - (position - start), position)

        self.each(start + again, pieces.count - again, lambda position: write(position - start, position))
        if again:
            self.each(start + pieces.count, again, write_again)


def ring(run: Run, x: jax.Array, given: Sequence[jax.Array]) -> Arrays:
    """Persistent blocks that loop over many rows."""
    schedule, several = run.schedule, run.schedule.warpgroups > 1
    blocks = min(schedule.blocks, run.rows)
    pieces = Pieces.of(run.columns, schedule.piece, segments_of(run.columns, schedule.piece))
    _check_pieces(run, pieces)

    def kernel(source: Any, known: Sequence[Any], *refs: Any) -> None:
        *written, scratch = refs
        first, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup") if several else 0
        block = _Block(
            run=run,
            pieces=pieces,
            source=source,
            scratch=scratch,
            blocks=blocks,
            first=first,
            rows=lax.div(run.rows - first + blocks - 1, blocks),
            warpgroup=warpgroup,
        )
        block.each(0, schedule.stages, block.fetch)

        @pl.loop(0, block.rows)
        def _(i: Any) -> None:
            writes = warpgroup == 0 if several else True
            row = run.row(first + i * blocks, source, known, written, writes)
            start = i * block.fetches
            lanes = block.statistics(i)
            constants = run.finish(row, *combine(lanes, scratch.lanes.at[warpgroup], run.interpret))
            if run.step is not None:
                block.results(start, row, written, constants)

    capacity = -(-pieces.capacity // WARPGROUP) * WARPGROUP
    segments = (2, run.segments.count, WARPGROUP)
    scratch = _Scratch(
        lanes=plgpu.SMEM((schedule.warpgroups, 2, WARPGROUP), jnp.float32),
        full=plgpu.Barrier(num_barriers=schedule.stages),
        stages=plgpu.SMEM((schedule.stages, capacity), x.dtype),
        segments=plgpu.SMEM(segments, jnp.float32) if run.segments.count > 1 else None,
        taken=plgpu.Barrier(num_arrivals=schedule.warpgroups) if several else None,
        merged=plgpu.Barrier(num_arrivals=schedule.warpgroups) if several else None,
    )
    return tuple(run.launch(kernel, run.out, {"block": blocks}, [scratch], schedule.warpgroups)(x, given))


def _check_pieces(run: Run, pieces: Pieces) -> None:
    """Raises `ValueError` if the schedule does not fit the row."""
    schedule, segment = run.schedule, run.segments.size
    if (
        schedule.stages % schedule.warpgroups
        or schedule.warpgroups > pieces.count
        or (pieces.count > 1 and pieces.size % segment)
    ):
        raise ValueError(
            f"expected stages a multiple of warpgroups, at most one warpgroup a piece and whole segments of {segment}"
            f" columns in a piece, got {schedule} for {pieces.count} pieces."
        )
