"""Rows split into pieces, and the copies of pieces into stages of shared memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


@dataclass(frozen=True)
class Pieces:
    """A row (or a piece of one) split into pieces: `count` - 1 of `size` columns and one of `last`."""

    count: int
    size: int
    last: int

    @classmethod
    def of(cls, columns: int, size: int, count: int | None = None) -> "Pieces":
        """Splits a row into pieces of `size` columns; with `count`, into that many, the last one takes the rest."""
        count = max(1, -(-columns // size)) if count is None else count
        return cls(count, size, columns - (count - 1) * size)

    @property
    def capacity(self) -> int:
        """Columns of the longest piece."""
        return self.last if self.count == 1 else max(self.size, self.last)

    def at(self, piece: Any, body: Callable[[int], None], wanted: Any = True) -> None:
        """Calls `body` with the number of columns of a piece as a compile-time constant."""
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
        pieces: How rows are split.
        sources: Arrays of rows.
        rings: Stages, for each array.
        full: A barrier for each stage.
        row: The row.
        piece: The piece.
        slot: The stage.
        wanted: Whether the piece exists.
    """

    def copy(columns: int) -> None:
        for source, ring in zip(sources, rings, strict=True):
            # An in-bounds contiguous piece of any length is one bulk copy without a descriptor.
            plgpu.copy_gmem_to_smem(
                source.at[row, pl.ds(piece * pieces.size, columns)],
                ring.at[slot, pl.ds(0, columns)],
                full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    pieces.at(piece, copy, wanted)
