"""Contracts of products of float32 by bfloat16: see `pallas_kernels.contract`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class _InParts:
    parts: int
    version: int = 1

    def __post_init__(self) -> None:
        if self.parts not in (2, 3):
            raise ValueError(f"parts must be 2 or 3, got {self.parts}.")


@dataclass(frozen=True)
class PartsContract(_InParts):
    """How wgmma sums products of which one operand is float32 and the other bfloat16.

    The float32 operand is a sum of `parts` bfloat16 numbers: its upper 16 bits, those of the rest, and so on; the last
    part is rounded to nearest. Two parts keep 16 bits of the fraction, where TF32 keeps 10, three keep all. An operand
    that is not finite is its own first part, and the others are zero. Each part has one chain of wgmma as
    `WgmmaContract` states it; the chains are added from the last part to the first in float32.

    Attributes:
        parts: Parts of the float32 operand.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> PartsContract(2).id
        'matmul/v1/f32-wgmma16-parts2-chains'
    """

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-wgmma16-parts{self.parts}-chains"


@dataclass(frozen=True)
class PartsChunkContract(_InParts):
    """How wgmma takes a sum over the rows of a batch where one operand is float32 and the other bfloat16.

    The float32 operand has the parts of `PartsContract`. One float32 accumulator starts at zero, or where a previous
    sum ended, and takes 16 rows at a time, upwards; of each 16 rows first the last part, then the one before it.

    Attributes:
        parts: Parts of the float32 operand.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> PartsChunkContract(2).id
        'chunks/v1/f32-wgmma16-parts2-chain'
    """

    @property
    def rows(self) -> int:
        """Rows of one step: a batch that is cut at multiples of it continues the same chain."""
        return 16

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"chunks/v{self.version}/f32-wgmma16-parts{self.parts}-chain"
