"""Split-K contracts of matmul: see `pallas_kernels.contract`."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pallas_kernels.base_contract import Contract

_SPLIT_STEP: Final = 64
_SPLIT: Final = 512  # elements of the shortest K split chosen
_SPLIT_COLUMNS: Final = 64
_SPLIT_BLOCKS_IN_FLIGHT: Final = 80  # blocks that saturate the memory of a Hopper GPU
_MOST_WGMMA_SPLITS: Final = 4  # sums that one warpgroup holds while it adds the tree
_SPLIT_BLOCK: Final = 64
_SHORTEST_SPLIT: Final = 256
_MOST_SPLITS: Final = 16


@dataclass(frozen=True)
class SplitTreeContract(Contract):
    """How one element of `x @ w` is summed with split K; each K split has its own contract.

    K is split at multiples of K / `splits` rounded up to a multiple of 64 (`split_length`). The partial sums are added
    in float32 as a fixed binary tree: (0 + 1) + (2 + 3).

    Attributes:
        splits: Number of K splits, at least 2.

    Example:
        >>> SplitTreeContract(4).id
        'matmul/v1/f32-split4-tree'
    """

    ID = "matmul/v{version}/f32-split{splits}-tree"
    splits: int

    def __post_init__(self) -> None:
        if self.splits < 2:
            raise ValueError(f"splits must be at least 2, got {self.splits}.")


@dataclass(frozen=True)
class _Chains(Contract):
    splits: int

    def __post_init__(self) -> None:
        _check_splits(self.splits)

    def split_length(self, k: int) -> int:
        """Returns the elements of a K split; the last one may be shorter."""
        return split_length(k, self.splits)


@dataclass(frozen=True)
class SplitWgmmaContract(_Chains):
    """How wgmma sums one element of `x @ w` with split K.

    K is split at multiples of `split_length(K)`, K / `splits` rounded up to a multiple of 64 (if K does not divide, the
    last split is shorter; a short K has fewer splits). Each split is a separate `WgmmaContract` chain. The partial sums
    are added in float32 as a fixed binary tree: (0 + 1) + (2 + 3).

    Attributes:
        splits: Number of K splits; a power of two, at least 2.

    Example:
        >>> SplitWgmmaContract(4).id, SplitWgmmaContract(4).split_length(8192)
        ('matmul/v1/f32-wgmma16-split4-tree', 2048)
    """

    ID = "matmul/v{version}/f32-wgmma16-split{splits}-tree"


@dataclass(frozen=True)
class SplitMmaContract(_Chains):
    """How mma.sync sums one element of `x @ w` with split K: as `SplitWgmmaContract`, in chains of `MmaContract`.

    Attributes:
        splits: Number of K splits; a power of two, at least 2.

    Example:
        >>> SplitMmaContract(2).id
        'matmul/v1/f32-mma16-split2-tree'
    """

    ID = "matmul/v{version}/f32-mma16-split{splits}-tree"


@dataclass(frozen=True)
class SplitContract(Contract):
    """How one element of `x @ w` is summed in float32 from bfloat16 products.

    Each operand is the sum of three bfloat16 limbs: the value rounded to nearest even, the remainder rounded, its
    remainder. Blocks of 64 elements of K start at 0, 64, 128, ...; in a block one float32 accumulator starts at zero
    and adds six products, each 16 elements of K at a time in ascending order, as the tensor core adds them: low by
    high, high by low (weights by activations), middle by middle, middle by high, high by middle, high by high. The
    blocks of a K split are added in ascending order in float32 to a sum that starts at zero, rounded to nearest; then
    the splits likewise. K is zero-padded.

    Attributes:
        k_split: Elements per K split, a multiple of 64.

    Example:
        >>> SplitContract(512).id, SplitContract(512).splits(1100)
        ('matmul/v1/f32-bf16x6-block64-shard512', 3)
    """

    ID = "matmul/v{version}/f32-bf16x6-block64-shard{k_split}"
    k_split: int

    def __post_init__(self) -> None:
        if self.k_split < 64 or self.k_split % 64:
            raise ValueError(f"k_split must be a positive multiple of 64, got {self.k_split}.")

    def splits(self, k: int) -> int:
        """Returns the number of K splits for `k` elements, at least 1."""
        return max(1, -(-k // self.k_split))


@dataclass(frozen=True)
class SplitChunkContract(Contract):
    """How a sum over the rows of a batch (a weight gradient) is computed in float32 from bfloat16 products.

    Chunks of `rows` rows start at 0, rows, 2 * rows, ...; each is summed by `SplitContract(rows)`, with the rows as K.
    The chunks are added in ascending order in float32 to a sum that starts at zero or at a previous sum. The last chunk
    is zero-padded.

    Attributes:
        rows: Rows per chunk, a multiple of 64.

    Example:
        >>> SplitChunkContract().id
        'chunks/v1/f32-bf16x6-block64-rows128'
    """

    ID = "chunks/v{version}/f32-bf16x6-block64-rows{rows}"
    rows: int = 128

    @property
    def split(self) -> SplitContract:
        """Summation order of a chunk."""
        return SplitContract(self.rows)


def split_count(k: int, n: int) -> int:
    """Returns the default number of K splits; 1 if one chain is fast enough.

    With one chain over K, a GPU runs one block per 64 columns of the weights. A long K with few columns leaves most of
    the chip idle, so K is split while the memory bandwidth can feed more blocks.

    Args:
        k: Length of the contracted dimension.
        n: Columns of the weights.

    Example:
        >>> split_count(8192, 1280), split_count(4096, 4096)
        (4, 1)
    """
    splits, blocks = 1, -(-n // _SPLIT_COLUMNS)
    while splits < _MOST_WGMMA_SPLITS and 2 * splits * blocks <= _SPLIT_BLOCKS_IN_FLIGHT and k >= 2 * splits * _SPLIT:
        splits *= 2
    return splits


def split_length(k: int, splits: int) -> int:
    """Returns the elements of one of `splits` K splits: K / splits rounded up to a multiple of 64.

    Example:
        >>> split_length(8192, 4), split_length(1000, 4)
        (2048, 256)
    """
    return max(1, -(-k // (splits * _SPLIT_STEP))) * _SPLIT_STEP


def add_as_tree(
    term: Callable[[int], Any], count: int, add: Callable[[Any, Any], Any] = operator.add, first: int = 0
) -> Any:
    """Adds the terms `first`, ..., `first + count - 1` as the binary tree of the split contracts.

    The left half is the largest power of two below `count`. Terms are requested from left to right, so at most
    log2(count) + 1 of them are live.

    Args:
        term: Returns a term by its index.
        count: Number of terms, at least 1.
        add: Adds two terms or sums.
        first: Index of the first term.

    Example:
        >>> add_as_tree(str, 5, "({} + {})".format)
        '(((0 + 1) + (2 + 3)) + 4)'
    """
    if count == 1:
        return term(first)
    left = 1 << ((count - 1).bit_length() - 1)
    total = add_as_tree(term, left, add, first)
    return add(total, add_as_tree(term, count - left, add, first + left))


def _check_splits(splits: int) -> None:
    if splits < 2 or splits & (splits - 1):
        raise ValueError(f"splits must be a power of two and at least 2, got {splits}.")


def split_contract(k: int) -> SplitContract:
    """Returns the contract of a float32 matmul by bfloat16 products with rows of `k` elements.

    There is about one split per 256 elements of K, at most 16, so up to 16 blocks share K when there are few rows.

    Args:
        k: Length of the contracted dimension; 0 is allowed.

    Raises:
        ValueError: If `k` is negative.

    Example:
        >>> split_contract(4096).k_split, split_contract(576).k_split, split_contract(14336).k_split
        (256, 320, 896)
    """
    if k < 0:
        raise ValueError(f"K must not be negative, got {k}.")
    blocks = max(1, -(-k // _SPLIT_BLOCK))
    splits = min(_MOST_SPLITS, max(1, k // _SHORTEST_SPLIT))
    return SplitContract(-(-blocks // splits) * _SPLIT_BLOCK)
