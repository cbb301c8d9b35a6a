"""Contracts of matmul that cut K into shards: see `pallas_kernels.contract`."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_SHARD_STEP: Final = 64
_SHARD: Final = 512  # elements of K in the shortest shard that is chosen
_SHARD_COLUMNS: Final = 64
_SHARD_BLOCKS: Final = 80  # what keeps the memory of a Hopper GPU busy
_MOST_WGMMA_SHARDS: Final = 4  # the sums that one warpgroup holds while it adds the tree
_SPLIT_BLOCK: Final = 64
_SHORTEST_SHARD: Final = 256
_MOST_SHARDS: Final = 16


@dataclass(frozen=True)
class ShardContract:
    """How one element of `x @ w` is summed where K is cut into shards, each of them under a contract of its own.

    K is cut at multiples of K / `shards` rounded up to a multiple of 64 (`shard_length`). The shards' sums are added in
    float32 as a fixed binary tree: (0 + 1) + (2 + 3).

    Attributes:
        shards: Shards of K, at least 2.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ShardContract(4).id
        'matmul/v1/f32-split4-tree'
    """

    shards: int
    version: int = 1

    def __post_init__(self) -> None:
        if self.shards < 2:
            raise ValueError(f"shards must be at least 2, got {self.shards}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-split{self.shards}-tree"


@dataclass(frozen=True)
class SplitWgmmaContract:
    """How one element of `x @ w` is summed by wgmma where K is cut into shards.

    K is cut at multiples of `shard_length(K)`, K / `shards` rounded up to a multiple of 64 (a K that does not divide
    has a shorter last shard, a short K fewer shards). Each shard is a chain of its own as `WgmmaContract` has it. The
    shards' sums are added in float32 as a fixed binary tree: (0 + 1) + (2 + 3).

    Attributes:
        shards: Shards of K; a power of two, at least 2.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> SplitWgmmaContract(4).id, SplitWgmmaContract(4).shard_length(8192)
        ('matmul/v1/f32-wgmma16-split4-tree', 2048)
    """

    shards: int
    version: int = 1

    def __post_init__(self) -> None:
        _check_shards(self.shards)

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-wgmma16-split{self.shards}-tree"

    def shard_length(self, k: int) -> int:
        """Returns the elements of K in a shard, the last one's may be fewer."""
        return shard_length(k, self.shards)


@dataclass(frozen=True)
class SplitContract:
    """How one element of `x @ w` is summed in float32 by bfloat16 products.

    Each operand is the sum of three bfloat16 parts: the value rounded to nearest even, the rest rounded, the rest.
    Blocks of 64 elements of K start at 0, 64, 128, ...; in a block one float32 accumulator starts at zero and takes six
    products, each 16 elements of K at a time, upwards, as the tensor core adds them: low by high, high by low (weights
    by activations), middle by middle, middle by high, high by middle, high by high. The blocks of a shard are added
    upwards in float32 to a sum that starts at zero, rounded to nearest; so are the shards. K counts as padded with
    zeros.

    Attributes:
        shard: Elements of K in one shard, a multiple of 64.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> SplitContract(512).id, SplitContract(512).shards(1100)
        ('matmul/v1/f32-bf16x6-block64-shard512', 3)
    """

    shard: int
    version: int = 1

    def __post_init__(self) -> None:
        if self.shard < 64 or self.shard % 64:
            raise ValueError(f"shard must be a positive multiple of 64, got {self.shard}.")

    def shards(self, k: int) -> int:
        """Returns the number of shards of `k` elements, at least 1."""
        return max(1, -(-k // self.shard))

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-bf16x6-block64-shard{self.shard}"


@dataclass(frozen=True)
class SplitChunkContract:
    """How a sum over the rows of a batch (a weight gradient) is taken in float32 by bfloat16 products.

    Chunks of `rows` rows start at 0, rows, 2 * rows, ...; each is summed as `SplitContract(rows)` has it, with the rows
    in the place of K. The chunks are added upwards in float32 to a sum that starts at zero, or where a previous one
    ended. Missing rows of the last chunk count as zeros.

    Attributes:
        rows: Rows of a chunk, a multiple of 64.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> SplitChunkContract().id
        'chunks/v1/f32-bf16x6-block64-rows128'
    """

    rows: int = 128
    version: int = 1

    @property
    def split(self) -> SplitContract:
        """Order of the sum of a chunk."""
        return SplitContract(self.rows)

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"chunks/v{self.version}/f32-bf16x6-block64-rows{self.rows}"


def split_shards(k: int, n: int) -> int:
    """Returns into how many shards K is cut where the caller leaves it open; 1 where one chain is fast enough.

    One chain over K gives a GPU a block for every 64 columns of the weights. A long K with few columns leaves most of
    the chip idle, so K is cut as long as that brings blocks that the memory can feed.

    Args:
        k: Length of the contracted dimension.
        n: Columns of the weights.

    Example:
        >>> split_shards(8192, 1280), split_shards(4096, 4096)
        (4, 1)
    """
    shards, blocks = 1, -(-n // _SHARD_COLUMNS)
    while shards < _MOST_WGMMA_SHARDS and 2 * shards * blocks <= _SHARD_BLOCKS and k >= 2 * shards * _SHARD:
        shards *= 2
    return shards


def shard_length(k: int, shards: int) -> int:
    """Returns the elements of K in one of `shards` shards: K / shards rounded up to a multiple of 64.

    Example:
        >>> shard_length(8192, 4), shard_length(1000, 4)
        (2048, 256)
    """
    return max(1, -(-k // (shards * _SHARD_STEP))) * _SHARD_STEP


def add_as_tree(
    term: Callable[[int], Any], count: int, add: Callable[[Any, Any], Any] = operator.add, first: int = 0
) -> Any:
    """Adds the terms `first`, ..., `first + count - 1` as the binary tree of the split contracts.

    The left half is as large a power of two as leaves something for the right one. Terms are asked for from left to
    right, so that no more than log2(count) + 1 of them are alive.

    Args:
        term: Returns a term by its number.
        count: Number of terms, at least 1.
        add: Adds two terms or sums.
        first: Number of the first term.

    Example:
        >>> add_as_tree(str, 5, "({} + {})".format)
        '(((0 + 1) + (2 + 3)) + 4)'
    """
    if count == 1:
        return term(first)
    left = 1 << ((count - 1).bit_length() - 1)
    total = add_as_tree(term, left, add, first)
    return add(total, add_as_tree(term, count - left, add, first + left))


def _check_shards(shards: int) -> None:
    if shards < 2 or shards & (shards - 1):
        raise ValueError(f"shards must be a power of two and at least 2, got {shards}.")


def split_contract(k: int) -> SplitContract:
    """Returns the contract of a float32 matmul by bfloat16 products whose rows have `k` elements.

    There are about as many shards as K has 256s, 16 at most: so many blocks of a GPU can share the K of few rows.

    Args:
        k: Length of the contracted dimension; 0 is allowed.

    Raises:
        ValueError: If `k` is negative.

    Example:
        >>> split_contract(4096).shard, split_contract(576).shard, split_contract(14336).shard
        (256, 320, 896)
    """
    if k < 0:
        raise ValueError(f"K must not be negative, got {k}.")
    blocks = max(1, -(-k // _SPLIT_BLOCK))
    shards = min(_MOST_SHARDS, max(1, k // _SHORTEST_SHARD))
    return SplitContract(-(-blocks // shards) * _SPLIT_BLOCK)
