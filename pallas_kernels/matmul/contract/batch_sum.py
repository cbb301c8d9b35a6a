"""The order of sums over the rows of a batch (gradients of weights)."""

from dataclasses import dataclass
from typing import Final

ROW_CHUNK: Final = 128
"""Rows in one chunk of a sum over the batch (weight gradients)."""


@dataclass(frozen=True)
class ChunkContract:
    """How a sum over the rows of a batch (a weight gradient) is taken.

    Rows are cut into chunks of `rows` at 0, rows, 2*rows, ...; each chunk is summed by a program of that one shape,
    missing rows of the last chunk counting as zeros, and the chunk sums are added upwards in float32.

    Attributes:
        rows: Rows of one chunk.
        version: Raised when the bits of an existing contract change on purpose.
    """

    rows: int = ROW_CHUNK
    version: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"chunks/v{self.version}/f32-rows{self.rows}-fold"


def chunk_contract() -> ChunkContract:
    """Returns the contract of every sum over the rows of a batch (weight gradients)."""
    return ChunkContract()
