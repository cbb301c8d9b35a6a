"""Contracts of float32 by bfloat16 products: see `pallas_kernels.contract`."""

from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class _InParts(Contract):
    parts: int

    def __post_init__(self) -> None:
        if self.parts not in (2, 3):
            raise ValueError(f"parts must be 2 or 3, got {self.parts}.")


@dataclass(frozen=True)
class PartsContract(_InParts):
    """How wgmma sums products of a float32 and a bfloat16 operand.

    The float32 operand is the sum of `parts` bfloat16 limbs: its upper 16 bits, the upper 16 bits of the remainder, and
    so on; the last limb is rounded to nearest. Two limbs keep 16 fraction bits (TF32 keeps 10), three keep all. A
    non-finite operand is its own first limb; its other limbs are zero. Each limb has one wgmma chain (`WgmmaContract`);
    the chains are added in float32 from the last limb to the first.

    Attributes:
        parts: Number of limbs of the float32 operand.

    Example:
        >>> PartsContract(2).id
        'matmul/v1/f32-wgmma16-parts2-chains'
    """

    ID = "matmul/v{version}/f32-wgmma16-parts{parts}-chains"


@dataclass(frozen=True)
class PartsChunkContract(_InParts):
    """How wgmma sums over the rows of a batch with a float32 and a bfloat16 operand.

    The float32 operand has the limbs of `PartsContract`. One float32 accumulator starts at zero, or at a previous sum,
    and adds 16 rows at a time in ascending order; for each 16 rows, from the last limb to the first.

    Attributes:
        parts: Number of limbs of the float32 operand.

    Example:
        >>> PartsChunkContract(2).id
        'chunks/v1/f32-wgmma16-parts2-chain'
    """

    ID = "chunks/v{version}/f32-wgmma16-parts{parts}-chain"

    @property
    def rows(self) -> int:
        """Rows per step: a batch split at multiples of it continues the same chain."""
        return 16
