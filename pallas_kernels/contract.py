"""Contracts: everything that can move a bit of a result, stated as data.

A contract is chosen from what belongs to the weights and the operation (row length, number of columns, storage order)
and never from what belongs to the batch: the functions below do not receive the number of rows, sequences or queries,
so no choice of theirs can depend on it. Whatever else makes a program fast is a schedule (`pallas_kernels.schedule`).

Source: "contract and schedule" in the project's design.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

LANES: Final = 128
"""Columns that the reduction of a short row adds side by side before its final tree; a group of lanes in a long one."""

ROW_CHUNK: Final = 128
"""Rows in one chunk of a sum over the batch (weight gradients)."""

KEY_BLOCK: Final = 128
"""Keys in one block of attention; blocks start at the absolute positions 0, 128, 256, ..."""

QUERY_BLOCK: Final = 16
"""Queries in one block of attention's sums over queries; blocks start at the absolute positions 0, 16, 32, ..."""

_SHORT_SEGMENT: Final = 1024
_LONG_SEGMENT: Final = 4096
_MOST_SHORT_SEGMENTS: Final = 8

_LONG_ROW: Final = 1_024
_ATTENTION_CHAIN: Final = 128
_LONG_CHAIN: Final = 512
_SHORT_CHAIN: Final = 192
_LONG_ROWS: Final = 964
_SHARD_STEP: Final = 64
_SHARD: Final = 512  # elements of K in the shortest shard that is chosen
_SHARD_COLUMNS: Final = 64
_SHARD_BLOCKS: Final = 80  # what keeps the memory of a Hopper GPU busy
_MOST_WGMMA_SHARDS: Final = 4  # the sums that one warpgroup holds while it adds the tree
_SPLIT_BLOCK: Final = 64
_SHORTEST_SHARD: Final = 256
_MOST_SHARDS: Final = 16


@dataclass(frozen=True)
class MatmulContract:
    """How one element of `x @ w` is summed.

    K is cut into blocks of `k_block`. Inside a block the products are added upwards by fused multiply-add into one
    accumulator of `dtype` that starts at zero; the block sums are then added upwards in that dtype.

    Attributes:
        k_block: Elements of K in one fused chain; the last block may be shorter.
        version: Raised when the bits of an existing contract change on purpose.
        dtype: "float32" or "float64".

    Example:
        >>> MatmulContract(k_block=512).id
        'matmul/v1/f32-chain512-fold'
    """

    k_block: int
    version: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.k_block < 1:
            raise ValueError(f"k_block must be at least 1, got {self.k_block}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f{self.dtype[5:]}-chain{self.k_block}-fold"


@dataclass(frozen=True)
class WgmmaContract:
    """How one element of `x @ w` is summed by wgmma.

    One float32 accumulator starts at zero and takes the products of 16 elements of K at a time, upwards, as the
    tensor core adds them; K is padded with zeros to a multiple of 16. There is no second accumulator and no split of K.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> WgmmaContract().id
        'matmul/v1/f32-wgmma16-chain'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-wgmma16-chain"


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
class WgmmaChunkContract:
    """How wgmma takes a sum over the rows of a batch (a weight gradient).

    One float32 accumulator starts at zero, or where a previous sum ended, and takes the outer products of 16 rows at a
    time, upwards, as the tensor core adds them; missing rows of the last 16 count as zeros.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> WgmmaChunkContract().id, WgmmaChunkContract().rows
        ('chunks/v1/f32-wgmma16-chain', 16)
    """

    version: int = 1

    @property
    def rows(self) -> int:
        """Rows of one step: a batch that is cut at multiples of it continues the same chain."""
        return 16

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"chunks/v{self.version}/f32-wgmma16-chain"


@dataclass(frozen=True)
class Tf32Contract:
    """How one element of `x @ w` is summed by wgmma in TF32.

    Of each float32 operand the tensor core reads the sign, the exponent and the upper 10 bits of the fraction; the
    lower 13 are dropped, not rounded. An operand thus loses up to 2**-10 of its magnitude, less than half of that on
    the average, always towards zero: a sum of products of one sign comes out 0.0007 (1.5 * 2**-11) too small. With
    random signs the errors are 2.1 to 2.7 times those of operands rounded to nearest, as XLA's own TF32 products round
    them; rounding would cost another pass over an operand where the weights are (N, K).

    One float32 accumulator starts at zero and takes the products of 8 elements of K at a time, upwards, as the tensor
    core adds them; K is padded with zeros. There is no second accumulator and no split of K.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> Tf32Contract().id
        'matmul/v1/f32-tf32-wgmma8-chain'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-tf32-wgmma8-chain"


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
class RowContract:
    """How a row is reduced.

    The row is padded to whole blocks of `lanes(columns)` columns. Lane i adds the i-th column of every block, blocks
    upwards, in float32. Each group of 128 neighbouring lanes is then added by a halving tree (lane i plus lane i + 64,
    and so on), and the groups by another one (group i plus group i + half their number, and so on).

    Rows shorter than 1024 columns have one group of lanes. Longer ones have as many lanes as the largest power of two
    that is not longer than the row, so that many threads, each with a vector of neighbouring columns, may share a row.

    Attributes:
        most_lanes: Columns of the longest block; a power of two.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> [RowContract().lanes(columns) for columns in (576, 1024, 5000, 128256)]
        [128, 1024, 4096, 8192]
    """

    most_lanes: int = 8_192
    version: int = 2

    def __post_init__(self) -> None:
        if self.most_lanes < 1 or self.most_lanes & (self.most_lanes - 1):
            raise ValueError(f"most_lanes must be a power of two, got {self.most_lanes}.")

    def lanes(self, columns: int) -> int:
        """Returns the columns of one block in a row of `columns` columns."""
        long = 1 << columns.bit_length() - 1 if columns >= _LONG_ROW else LANES
        return min(self.most_lanes, long)

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"rows/v{self.version}/f32-lanes{min(LANES, self.most_lanes)}to{self.most_lanes}-tree"


@dataclass(frozen=True)
class OnlineRowContract:
    """How the maximum m of a row and the sum of exp(x - m) are taken in one pass over the row.

    The row is cut into segments of `segment` columns (the last one takes fewer than `lanes` that are left over with
    it), a segment into chunks of `chunk` blocks of `lanes` columns. Lane i sees the i-th column of every block. In a
    segment it starts with maximum -inf and sum 0, and each chunk upwards raises the maximum to that of the chunk's
    columns first, then makes the sum fma(sum, exp(old maximum - new maximum), the chunk's exponentials added upwards).
    Of several segments, lane by lane, the maximum n is taken, then, upwards, fma(segment's sum, exp(segment's maximum
    - n), total). A halving tree takes the maximum m of the lanes, another one adds their sums, each multiplied by
    exp(lane's maximum - m) first. Where a maximum is not finite, 0 stands for it in the exponents.

    Attributes:
        lanes: Columns of one block; a power of two.
        chunk: Blocks of one chunk.
        segment: Columns of one segment, whole chunks.
        version: Raised when the bits of an existing contract change on purpose.
    """

    lanes: int = LANES
    chunk: int = 8
    segment: int = _LONG_SEGMENT
    version: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes must be a power of two, got {self.lanes}.")
        if self.chunk < 1 or self.segment < 1 or self.segment % (self.chunk * self.lanes):
            raise ValueError(
                f"segment must be a multiple of the {self.chunk * self.lanes} columns of a chunk, got {self.segment}."
            )

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"online-rows/v{self.version}/f32-lanes{self.lanes}-chunk{self.chunk}-segment{self.segment}-tree"


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


@dataclass(frozen=True)
class AttentionContract:
    """How one query attends to its keys.

    Keys are walked in blocks of `key_block` at the absolute positions 0, key_block, 2*key_block, ...; after each block
    that holds a visible key the running maximum, sum and weighted values are rescaled (the usual online softmax).
    A score is one fused chain over the head's width, times the scale. Weighted values are one fused chain over a
    block's keys, in which a key that is not visible counts as zero; a zero comes out as +0. The sum of a block's
    exponentials follows `RowContract`.

    Sums over queries (the gradients of keys and values) walk blocks of `query_block` queries at absolute positions.
    The rows of a block (query by query, and in a query the heads that share a key) are fused chains of `chain_rows`
    rows, added upwards in float32.

    Attributes:
        key_block: Keys of one block.
        query_block: Queries of one block in the backward pass.
        longest_chain: Most rows in one chain of the backward pass.
        version: Raised when the bits of an existing contract change on purpose.
    """

    key_block: int = KEY_BLOCK
    query_block: int = QUERY_BLOCK
    longest_chain: int = _ATTENTION_CHAIN
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("key_block", "query_block", "longest_chain"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def chain_rows(self, group: int) -> int:
        """Returns the rows of a chain where `group` query heads share a key: the largest equal part of a block.

        Example:
            >>> AttentionContract().chain_rows(3), AttentionContract().chain_rows(9)
            (48, 72)
        """
        rows = self.query_block * group
        return max(n for n in range(1, self.longest_chain + 1) if rows % n == 0)

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"attention/v{self.version}/f32-keys{self.key_block}-online"


def matmul_contract(k: int, *, transpose_w: bool) -> MatmulContract:
    """Returns the contract of a matmul whose rows have `k` elements.

    The block of K is the longest that every CPU engine runs as one fused chain at every number of rows: 512 for
    weights stored as (N, K) and for long rows; for short rows of (K, N) weights the largest divisor of K up to 192,
    because there the library behind XLA's dot cuts K by the number of rows (benchmarks/NOTES.md).

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


def row_contract() -> RowContract:
    """Returns the contract of every reduction over a row (norms, softmax family, sum, mean)."""
    return RowContract()


def online_row_contract(columns: int) -> OnlineRowContract:
    """Returns the contract of the softmax family's statistics where a kernel takes them in one pass.

    A segment is what one warpgroup takes, so that several of them can share a row.

    Args:
        columns: Columns of a row.

    Example:
        >>> online_row_contract(4096).segment, online_row_contract(128256).segment
        (1024, 4096)
    """
    short = columns <= _MOST_SHORT_SEGMENTS * _SHORT_SEGMENT
    return OnlineRowContract(segment=_SHORT_SEGMENT if short else _LONG_SEGMENT)


def chunk_contract() -> ChunkContract:
    """Returns the contract of every sum over the rows of a batch (weight gradients)."""
    return ChunkContract()


def attention_contract() -> AttentionContract:
    """Returns the contract of attention, the same for every head size and cache layout."""
    return AttentionContract()
