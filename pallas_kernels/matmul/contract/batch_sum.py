"""The order of sums over the rows of a batch (gradients of weights)."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract

ROW_CHUNK: Final = 128
"""Rows in one chunk of a sum over the batch (weight gradients)."""


@dataclass(frozen=True)
class ChunkContract(Contract):
    """Summation order over the rows of a batch (a weight gradient).

    Rows are split into chunks at 0, rows, 2*rows, ...; every chunk is summed by the same fixed-shape program, with the
    last chunk zero-padded, and the chunk sums are added in ascending order in float32, from 0 or a previous sum. Within
    a chunk

    - products of two operands (the gradient of a matrix) are one chain of fused multiply-adds, in ascending order;
    - rows that are only added (the gradients of a bias and of the weight of a norm, whose products are rounded first)
      are added by a halving tree: row i plus row i + rows/2, and so on;
    - the rows of one token (the gradient of an embedding) are added in ascending order.

    Attributes:
        rows: Rows per chunk.
        accumulator: "float32", or "float64" for groups of rows (`pallas_kernels.ragged_dot`) of that dtype, whose chunk
            sums are added in it.
    """

    rows: int = ROW_CHUNK
    accumulator: str = "float32"

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return f"chunks/v{self.version}/f{self.accumulator[5:]}-rows{self.rows}-fold"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}.")


def chunk_contract() -> ChunkContract:
    """Returns the contract of every sum over the rows of a batch (weight gradients)."""
    return ChunkContract()
