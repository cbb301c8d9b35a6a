"""Rows cut into pieces, and the copies of pieces into stages of shared memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


@dataclass(frozen=True)
class Pieces:
    """A row (or a piece of one) cut into pieces: `count` - 1 of `size` columns and one of `last`."""

    count: int
    size: int
    last: int

    @classmethod
    def of(cls, columns: int, size: int, count: int | None = None) -> "Pieces":
        """Cuts a row into pieces of `size` columns; with `count` so many, of which the last one takes what is left."""
        count = max(1, -(-columns // size)) if count is None else count
        return cls(count, size, columns - (count - 1) * size)

    @property
    def capacity(self) -> int:
        """Columns of the longest piece."""
        return self.last if self.count == 1 else max(self.size, self.last)

    def at(self, piece: Any, body: Callable[[int], None], wanted: Any = True) -> None:
        """Calls `body` with the columns of a piece, which it needs as a constant."""
        if self.count == 1 or self.last == self.size:
            body(self.last) if wanted is True else pl.when(wanted)(functools.partial(body, self.last))
            return
        pl.when(wanted & (piece < self.count - 1))(functools.partial(body, self.size))
        pl.when(wanted & (piece == self.count - 1))(functools.partial(body, self.last))


def copy_piece(
    pieces: Pieces,
    sources: Sequence[Any],
    rings: Sequence[Any],
    full: Any,
    *,
    row: Any,
    piece: Any,
    slot: Any,
    wanted: Any,
) -> None:
    """Starts the copies of a piece of a row.

    Args:
        pieces: How rows are cut.
        sources: Arrays of rows.
        rings: Stages, for each array.
        full: A barrier for each stage.
        row: The row.
        piece: The piece.
        slot: The stage.
        wanted: Whether there is such a piece.
    """

    def copy(columns: int) -> None:
        for source, ring in zip(sources, rings, strict=True):
            # In bounds, a contiguous piece is one instruction without a descriptor, of any length.
            plgpu.copy_gmem_to_smem(
                source.at[row, pl.ds(piece * pieces.size, columns)],
                ring.at[slot, pl.ds(0, columns)],
                full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    pieces.at(piece, copy, wanted)
