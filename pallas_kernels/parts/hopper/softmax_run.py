"""One call of the softmax engine: its shape, what to compute, and how results are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP
from pallas_kernels.parts.hopper.edge import load_edge, store_edge
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.online_lanes import Load, load_columns
from pallas_kernels.parts.hopper.online_row import OnlineRow
from pallas_kernels.parts.hopper.pieces import Pieces
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule

Arrays = tuple[jax.Array, ...]
Finish = Callable[[OnlineRow, jax.Array, jax.Array], Arrays]
Step = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call.

    Attributes:
        rows: Rows.
        columns: Columns of a row.
        segments: How a row is split into the segments of the contract.
        finish: Maps a row's statistics to scalars.
        step: Maps columns and those scalars to results; None if there are no full-width results.
        results: Results of `step`.
        out: Types of the results, then of the scalars.
        schedule: How to feed the rows.
        interpret: Whether the interpreter runs the kernel.
    """

    rows: int
    columns: int
    segments: Pieces
    finish: Finish
    step: Step | None
    results: int
    out: Sequence[Any]
    schedule: OnlineSchedule
    interpret: Any

    def row(self, index: Any, source: Any, given: Sequence[Any], written: Sequence[Any], writes: Any) -> OnlineRow:
        """Returns a row; `writes` tells whether its scalars are written here."""
        return OnlineRow(index, source, given, written[self.results :], writes, self.interpret)

    def launch(
        self,
        kernel: Callable[..., None],
        out: Sequence[Any],
        grid: Mapping[str, int],
        scratch: Sequence[Any] = (),
        warpgroups: int = 1,
    ) -> Callable[..., Any]:
        """Returns the launch of one of the call's kernels."""
        return launch(
            profile_name(self.finish),
            kernel,
            list(out),
            grid,
            scratch,
            warpgroups={"warpgroup": warpgroups},
            by_lanes=True,
            interpret=self.interpret,
        )

    def read(self, row: OnlineRow, first: Any, columns: int) -> list[jax.Array]:
        """Returns the columns from `first` on in blocks of 128, the last one padded with -inf."""
        whole, rest = divmod(columns, WARPGROUP)
        starts = (first + i * WARPGROUP for i in range(whole))
        blocks = [load_columns(row.source.at[row.index, pl.ds(start, WARPGROUP)], WARPGROUP) for start in starts]
        if rest:
            blocks.append(load_edge(row.source.at[row.index], first + whole * WARPGROUP, rest, self.interpret))
        return blocks

    def write(
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

    def emit(
        self, row: OnlineRow, load: Load, written: Sequence[Any], first: Any, columns: int, constants: Arrays
    ) -> None:
        """Writes the results of a piece of `columns` columns that starts at column `first`."""
        step = self.step
        if step is None:
            return

        def write(offsets: Sequence[Any], width: int) -> None:
            # Issue all loads first: the compiler does not move loads across stores.
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
            # The last block ends at the end of the row; columns shared with the previous block are written twice.
            write([columns - WARPGROUP], WARPGROUP)
