"""Contracts of products whose every step is rounded: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract
from pallas_kernels.contract.product import ProductSpec

_BLOCK: Final = 128


@dataclass(frozen=True)
class RoundedMatmulContract(Contract):
    """How one element of `x @ w` is summed by plain products and sums.

    K is split into blocks of `k_block`. Within a block, each product is rounded to `dtype` and then added to one
    accumulator of `dtype`, in ascending order; it starts at +0. The block sums are added in ascending order to another
    one, which starts at +0 too. Products of 16-bit operands are exact in float32.

    Attributes:
        k_block: Elements of K in one chain; the last block may be shorter.
        dtype: "float32" or "float64".

    Example:
        >>> RoundedMatmulContract().id
        'matmul/v1/f32-rounded-chain128-fold'
    """

    k_block: int = _BLOCK
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.k_block < 1:
            raise ValueError(f"k_block must be at least 1, got {self.k_block}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}.")

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return f"matmul/v{self.version}/f{self.dtype[5:]}-rounded-chain{self.k_block}-fold"


@dataclass(frozen=True)
class RoundedChunkContract(Contract):
    """How the outer products of the rows of a batch are summed by plain products and sums (a weight gradient).

    Chunks of `rows` rows are chains as in `RoundedMatmulContract`, in float32. Their sums are added in ascending order
    to +0, or to a previous sum.

    Attributes:
        rows: Rows per chunk.

    Example:
        >>> RoundedChunkContract().id
        'chunks/v1/f32-rounded-rows128-fold'
    """

    ID = "chunks/v{version}/f32-rounded-rows{rows}-fold"
    rows: int = _BLOCK

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}.")


def rounded_contract(product: ProductSpec) -> RoundedMatmulContract:
    """Returns the contract of a product by plain products and sums.

    Example:
        >>> rounded_contract(ProductSpec(("float32", "float64"), "float64", 576)).id
        'matmul/v1/f64-rounded-chain128-fold'
    """
    return RoundedMatmulContract(dtype="float64" if product.is_wide else "float32")
