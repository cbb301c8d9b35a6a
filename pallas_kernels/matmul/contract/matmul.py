"""Contracts of matmul: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract
from pallas_kernels.contract.product import ProductSpec

_WIDE_CHAIN: Final = 128
_LONG_CHAIN: Final = 512
_SHORT_CHAIN: Final = 192
_LONG_ROWS: Final = 964


@dataclass(frozen=True)
class MatmulContract(Contract):
    """Summation order of one element of `x @ w`.

    K is split into blocks of `k_block`. Within a block, fused multiply-adds accumulate the products in ascending order
    into one accumulator of `dtype` that starts at zero; the block sums are then added in ascending order in that dtype.

    Attributes:
        k_block: Elements of K in one fused chain; the last block may be shorter.
        dtype: "float32" or "float64".

    Example:
        >>> MatmulContract(k_block=512).id
        'matmul/v1/f32-chain512-fold'
    """

    k_block: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.k_block < 1:
            raise ValueError(f"k_block must be at least 1, got {self.k_block}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}.")

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return f"matmul/v{self.version}/f{self.dtype[5:]}-chain{self.k_block}-fold"


@dataclass(frozen=True)
class WgmmaContract(Contract):
    """How one element of `x @ w` is summed by wgmma.

    One float32 accumulator starts at zero and adds the products of 16 elements of K at a time in ascending order, as
    the tensor core adds them; K is zero-padded to a multiple of 16. There is no second accumulator and no split K.

    Example:
        >>> WgmmaContract().id
        'matmul/v1/f32-wgmma16-chain'
    """

    ID = "matmul/v{version}/f32-wgmma16-chain"


@dataclass(frozen=True)
class WgmmaChunkContract(Contract):
    """How wgmma sums over the rows of a batch (a weight gradient).

    One float32 accumulator starts at zero, or at a previous sum, and adds the outer products of 16 rows at a time in
    ascending order, as the tensor core adds them; the last 16 rows are zero-padded.

    Example:
        >>> WgmmaChunkContract().id, WgmmaChunkContract().rows
        ('chunks/v1/f32-wgmma16-chain', 16)
    """

    ID = "chunks/v{version}/f32-wgmma16-chain"

    @property
    def rows(self) -> int:
        """Rows per step: a batch split at multiples of it continues the same chain."""
        return 16


@dataclass(frozen=True)
class Tf32Contract(Contract):
    """How one element of `x @ w` is summed by wgmma in TF32.

    The tensor core reads the sign, the exponent and the upper 10 fraction bits of each float32 operand; the lower 13
    bits are truncated, not rounded. An operand thus loses up to 2**-10 of its magnitude, on average less than half of
    that, always towards zero: a sum of products of one sign is 0.0007 (1.5 * 2**-11) too small. With random signs the
    errors are 2.1 to 2.7 times as large as with operands rounded to nearest, as in XLA's TF32 products; for (N, K)
    weights, rounding would take another pass over an operand.

    One float32 accumulator starts at zero and adds the products of 8 elements of K at a time in ascending order, as the
    tensor core adds them; K is zero-padded. There is no second accumulator and no split K.

    Example:
        >>> Tf32Contract().id
        'matmul/v1/f32-tf32-wgmma8-chain'
    """

    ID = "matmul/v{version}/f32-tf32-wgmma8-chain"


@dataclass(frozen=True)
class MmaContract(Contract):
    """How one element of `x @ w` is summed by mma.sync on 16-bit operands.

    One float32 accumulator starts at zero and adds the products of 16 elements of K at a time in ascending order, by
    the instruction `mma.sync.m16n8k16`; K is zero-padded to a multiple of 16. There is no second accumulator and no
    split K. How the instruction adds its 16 products belongs to the architecture: on Hopper as wgmma does, so that the
    bits are those of `WgmmaContract`; Ampere's tensor cores are documented to add 8 at a time.

    Example:
        >>> MmaContract().id
        'matmul/v1/f32-mma16-chain'
    """

    ID = "matmul/v{version}/f32-mma16-chain"


@dataclass(frozen=True)
class MmaChunkContract(Contract):
    """How mma.sync sums over the rows of a batch (a weight gradient).

    One float32 accumulator starts at zero, or at a previous sum, and adds the outer products of 16 rows at a time in
    ascending order, by the instruction of `MmaContract`; the last 16 rows are zero-padded.

    Example:
        >>> MmaChunkContract().id, MmaChunkContract().rows
        ('chunks/v1/f32-mma16-chain', 16)
    """

    ID = "chunks/v{version}/f32-mma16-chain"

    @property
    def rows(self) -> int:
        """Rows per step: a batch split at multiples of it continues the same chain."""
        return 16


@dataclass(frozen=True)
class MmaTf32Contract(Contract):
    """How one element of `x @ w` is summed by mma.sync in TF32.

    As `Tf32Contract`, by the instruction `mma.sync.m16n8k8`: float32 operands are truncated to 10 fraction bits, and
    one float32 accumulator adds the products of 8 elements of K at a time in ascending order.

    Example:
        >>> MmaTf32Contract().id
        'matmul/v1/f32-tf32-mma8-chain'
    """

    ID = "matmul/v{version}/f32-tf32-mma8-chain"


def matmul_contract(k: int, *, transpose_w: bool) -> MatmulContract:
    """Returns the contract of a matmul with rows of `k` elements.

    The K block is the longest that every CPU library runs as one fused chain for any number of rows: 512 for (N, K)
    weights and for long rows; for short rows of (K, N) weights the largest divisor of K up to 192, because the library
    that XLA's dot calls there splits K depending on the number of rows (benchmarks/NOTES.md).

    Args:
        k: Length of the contracted dimension; 0 is allowed.
        transpose_w: True when the weights are stored as (N, K).

    Raises:
        ValueError: If `k` is negative.

    Example:
        >>> matmul_contract(2048, transpose_w=False).k_block, matmul_contract(576, transpose_w=False).k_block
        (512, 192)
    """
    if k < 0:
        raise ValueError(f"K must not be negative, got {k}.")
    if transpose_w or k >= _LONG_ROWS:
        return MatmulContract(_LONG_CHAIN)
    divisors = [b for b in range(_SHORT_CHAIN // 3, _SHORT_CHAIN + 1) if k % b == 0]
    return MatmulContract(max(divisors, default=_SHORT_CHAIN))


def chain_contract(product: ProductSpec) -> MatmulContract:
    """Returns the contract of a product whose elements are chains of fused multiply-adds.

    Example:
        >>> chain_contract(ProductSpec(("float32", "float64"), "float64", 576)).id
        'matmul/v1/f64-chain128-fold'
    """
    if product.is_wide:
        return MatmulContract(_WIDE_CHAIN, dtype="float64")
    return matmul_contract(product.k, transpose_w=product.along_k)
