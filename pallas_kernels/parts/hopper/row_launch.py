"""A launch of the row engine: its arrays, its pieces of rows, and how its warpgroups iterate over them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
from jax import lax

from pallas_kernels.parts.hopper.pieces import Pieces, copy_piece
from pallas_kernels.parts.hopper.prefetch import prefetch_row
from pallas_kernels.parts.hopper.strip import Strip
from pallas_kernels.parts.hopper.team import Team
from pallas_kernels.schedule.hopper.rows import RowSchedule

PlaceOf = Callable[[Any], Any]

COLUMN_NUMBERS: Final = -1
"""Placeholder among a step's vectors for the column indices."""


@dataclass(frozen=True)
class Picked:
    """An array from which each row of the kernel reads a selected row.

    Attributes:
        array: (S, C); also (S, C) where a vector is expected.
        place: Maps the `Row` to the array's row, for example by one of the row's scalars.
    """

    array: jax.Array
    place: PlaceOf | None


@dataclass(frozen=True)
class Parted:
    """A result with `parts` rows for each row of the kernel.

    In each group of `together` rows, all first parts come first, then all second parts, and so on.

    Attributes:
        dtype: Dtype of the result.
        parts: Rows of the result for each row of the kernel.
        together: Rows of a group; it divides the number of rows.
    """

    dtype: Any
    parts: int = 1
    together: int = 1

    def row(self, index: Any, part: int) -> Any:
        """Returns the result row of a part of a row."""
        if self.parts == 1:
            return index
        return index + (lax.div(index, self.together) * (self.parts - 1) + part) * self.together


@dataclass(frozen=True, kw_only=True)
class Companion:
    """Other blocks of a launch that read the rows which its own blocks read at about the same time, from the cache.

    Attributes:
        rows: Rows of a group.
        apart: Distance of a group's rows; as many groups then share the rows that one group would otherwise span.
        blocks: Other blocks (clusters, if a cluster shares a row) before the blocks of a group of rows: they take
            longer, and should not be the last ones.
        warpgroups: Warpgroups of a block; they must be those of the row program's.
        arrays: What they read, a pytree.
        out: Type of their result.
        memory: Types of their shared memory.
        body: A function of the group, of the other warpgroup's number in it, the arrays, the result and the shared
            memory. Neighbouring numbers are the warpgroups of a block.
    """

    rows: int
    blocks: int
    warpgroups: int
    arrays: Any
    out: Any
    memory: list[Any]
    body: Callable[..., None]
    apart: int = 1

    def check(self, schedule: RowSchedule, rows: int) -> None:
        """Raises `ValueError` unless a block or a cluster of blocks of as many warpgroups takes each row."""
        one = schedule.blocks == rows and not schedule.stages and not schedule.rows_per_warp
        if not one or schedule.team != self.warpgroups:
            raise ValueError(
                f"expected a block of {self.warpgroups} warpgroups for each of {rows} rows, got {schedule}."
            )

    def grid(self, rows: int) -> int:
        """Returns the number of all blocks."""
        return -(-rows // (self.rows * self.apart)) * self.apart * (self.rows + self.blocks)

    def turn(self, block: Any) -> "Turn":
        """Returns what a block of the grid does."""
        step = self.rows + self.blocks
        group, place = lax.div(block, step), lax.rem(block, step) - self.blocks
        first = lax.div(group, self.apart) * (self.rows * self.apart) + lax.rem(group, self.apart)
        return Turn(self, group, place, first + place * self.apart)


@dataclass(frozen=True)
class Turn:
    """What a block of a launch with a companion does.

    Attributes:
        companion: The companion.
        group: The group of rows.
        place: The block's place in the group: that of a row, or negative.
        row: The row that the block has if it has one.
    """

    companion: Companion
    group: Any
    place: Any
    row: Any

    def run(
        self,
        rows: int,
        program: Callable[[], None],
        member: Any,
        members: int,
        arrays: Any,
        out: Any,
        memory: Sequence[Any],
    ) -> None:
        """Runs the program of the row if there is such a row, or the companion's body.

        Args:
            rows: Number of rows.
            program: The program of the row.
            member: The warpgroup's number in its block or cluster.
            members: How many it has.
            arrays: As for the companion's body, like the rest.
            out: The result.
            memory: The shared memory.
        """
        ours = self.place >= 0
        pl.when(ours & (self.row < rows))(program)

        @pl.when(~ours)
        def _() -> None:
            number = (self.companion.blocks + self.place) * members + member
            self.companion.body(self.group, number, arrays, out, *memory)


@dataclass(frozen=True)
class Place:
    """A block of lanes: its piece of the row, its column in the piece, and the stage that holds the piece.

    Attributes:
        piece: Index of the piece.
        block: First column, within the piece.
        slot: Stage of the circular buffer, if present.
        columns: Columns of the piece.
        whole: Whether the block lies entirely within the piece.
    """

    piece: Any
    block: Any
    slot: Any
    columns: int
    whole: bool

    def column(self, launch: "Launch") -> Any:
        """Returns the column of the row."""
        return self.piece * launch.pieces.size + self.block


@dataclass(frozen=True)
class Launch:
    """One launch: its references and how to iterate over them."""

    sources: Sequence[tuple[Any, PlaceOf | None]]
    vectors: Sequence[tuple[Any, PlaceOf | None]]
    given: Sequence[Any]
    results: Sequence[tuple[Any, Parted]]
    numbers: Sequence[Any]
    team: Team
    barriers: Any
    ring: Sequence[Any]
    pieces: Pieces
    columns: int
    vector: int
    passes: int
    folds: int
    exchanges: int
    member: Any
    first_row: Any
    rows: Any
    schedule: RowSchedule
    preloaded: dict[Any, jax.Array] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """Lanes of a block."""
        return self.team.lanes

    @property
    def share(self) -> int:
        """Lanes of one warpgroup."""
        return self.lanes // self.schedule.members

    @property
    def lane(self) -> Any:
        """First lane of this warpgroup."""
        return self.member * self.share

    @property
    def kept(self) -> bool:
        """Whether a whole row stays in shared memory until its last pass."""
        return self.pieces.count <= self.schedule.stages

    @property
    def fetches(self) -> int:
        """Pieces that are fetched for one row."""
        return self.pieces.count * (1 if self.kept else self.passes)

    def strips(self, place: Place, *, spread: bool = True) -> Iterator[Strip]:
        """Returns this warpgroup's part of a block; not spread unless wanted, whatever the schedule."""
        width = self.team.threads * self.vector
        strips = self.team.spread if spread else 0
        for i, first in enumerate(range(0, self.share, width)):
            lane = self.lane if strips else self.lane + first
            held = {"threads": self.team.threads, "spread": strips, "number": i}
            yield Strip(place.block, lane, place.columns, self.lanes, self.vector, place.whole, **held)

    def once(self, action: Callable[[], None]) -> None:
        """Runs an action in one warpgroup of the team."""
        if self.schedule.members == 1:
            action()
        else:
            pl.when(self.member == 0)(action)

    def load_vector(self, number: int, row: Any, place: Place, part: int, strip: Strip) -> jax.Array:
        """Returns a strip of a vector, of one of its rows if it is picked, or of `COLUMN_NUMBERS`."""
        if number == COLUMN_NUMBERS:
            return replace(strip, block=place.column(self)).numbers(self.team.interpret)
        key = (number, place.column(self), part) if self.schedule.preload else None
        if key is not None and key in self.preloaded:
            return self.preloaded[key]
        shifted = replace(strip, block=place.column(self), columns=self.columns)
        return shifted.load(self.vectors[number][0], row, self.team.interpret)

    def preload(self) -> None:
        """Reads the vectors into registers, once for all rows."""
        pieces = self.pieces
        for piece in range(pieces.count):
            columns = pieces.last if piece == pieces.count - 1 else pieces.size
            for block in range(0, columns, self.lanes):
                place = Place(piece, block, None, columns, block + self.lanes <= columns)
                for i, strip in enumerate(self.strips(place)):
                    for number in range(len(self.vectors)):
                        loaded = self.load_vector(number, None, place, i, strip)
                        self.preloaded[number, place.column(self), i] = loaded

    def prefetch(self, row: Any, wanted: Any) -> None:
        """Asks the L2 cache to fetch a row, if it exists."""
        for source, place in self.sources:
            if place is None:
                prefetch_row(source, row, wanted, self.member, self.schedule.members, self.team.interpret)

    def fetch(self, position: Any) -> None:
        """Starts the copies of the piece at a position of this block's sequence, if it exists."""
        pieces = self.pieces
        row = self.first_row + lax.div(position, self.fetches) * self.schedule.blocks
        piece = lax.rem(lax.rem(position, self.fetches), pieces.count)
        slot = lax.rem(position, self.schedule.stages)

        wanted = position < self.rows * self.fetches
        if self.schedule.team > 1:
            wanted &= self.member == 0
        sources = [source for source, _ in self.sources]
        copy_piece(pieces, sources, self.ring, self.barriers, row=row, piece=piece, slot=slot, wanted=wanted)
