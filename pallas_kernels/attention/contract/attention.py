"""The contract of attention: see `pallas_kernels.contract`."""

from dataclasses import dataclass, field
from typing import Final

from pallas_kernels.base_contract import Contract

KEY_BLOCK: Final = 128
"""Keys in one block of attention; blocks start at the absolute positions 0, 128, 256, ..."""

QUERY_BLOCK: Final = 16
"""Queries in one block of attention's sums over queries; blocks start at the absolute positions 0, 16, 32, ..."""

SCORE_BLOCK: Final = 256
"""Columns of a head in one fused chain of a score."""

_ATTENTION_CHAIN: Final = 128


@dataclass(frozen=True)
class AttentionContract(Contract):
    """How one query attends to its keys.

    Keys are processed in blocks of `key_block` at the absolute positions 0, key_block, 2*key_block, ...; after each
    block that holds a visible key the running maximum, sum and weighted values are rescaled (the usual online softmax).
    A score is one chain over the head's width, times the scale; fused chains have at most 256 columns, and those of a
    wider head are added in ascending order. Weighted values are one chain over a block's keys, in which an invisible
    key counts as zero; zero results are +0. The sum of a block's exponentials follows `RowContract`.

    With a soft cap c the score is c * tanh(chain * (scale / c)), the factor rounded once to float32. Then a bias is
    added, then slope * (key position - query position), each product and sum rounded. After the last block a sink
    enters the maximum and the sum like a block of one key without a value.

    Sums over queries (the gradients of keys and values) run over blocks of `query_block` queries at absolute positions.
    The rows of a block (query-major, then the heads that share a key) are chains of `chain_rows` rows, added in
    ascending order in float32.

    Attributes:
        key_block: Keys of one block.
        query_block: Queries of one block in the backward pass.
        longest_chain: Most rows in one chain of the backward pass.
        fused: Whether a chain consists of fused multiply-adds; otherwise each product is rounded before it is added.
    """

    key_block: int = KEY_BLOCK
    query_block: int = QUERY_BLOCK
    longest_chain: int = _ATTENTION_CHAIN
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("key_block", "query_block", "longest_chain"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def chain_rows(self, group: int) -> int:
        """Returns the rows of a chain if `group` query heads share a key: the largest equal part of a block.

        Example:
            >>> AttentionContract().chain_rows(3), AttentionContract().chain_rows(9)
            (48, 72)
        """
        rows = self.query_block * group
        return max(n for n in range(1, self.longest_chain + 1) if rows % n == 0)

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return f"attention/v{self.version}/f32-{'' if self.fused else 'rounded-'}keys{self.key_block}-online"


def attention_contract(*, fused: bool = True) -> AttentionContract:
    """Returns the contract of attention, the same for every head size and cache layout.

    Args:
        fused: Whether a chain consists of fused multiply-adds, as on a CPU.

    Example:
        >>> attention_contract(fused=False).id
        'attention/v1/f32-rounded-keys128-online'
    """
    return AttentionContract(fused=fused)


@dataclass(frozen=True)
class SplitAttentionContract(Contract):
    """How one query attends to its keys on a Hopper GPU.

    Keys are processed in ascending blocks of `key_block` at the absolute positions 0, key_block, 2 * key_block, ...
    Blocks belong to splits of `split` keys at the absolute positions 0, split, 2 * split, ...; a split starts with the
    maximum `LEAST`, the sum 0 and the values 0. With c = scale * log2(e), rounded once to float32, a block maps maximum
    m, sum l and values o to

        s  = query @ keys^T                    one wgmma chain over the head, steps of 16, float32
        m' = max(m, max(s) * c)                s is -inf where a key is not seen
        p  = ex2(fma(s, c, -m'))
        a  = ex2(m - m')
        l' = fma(l, a, sum(p))
        o' = o * a + round(p) @ values         one wgmma chain that starts at o * a; p in the values' dtype

    where ex2 is `ex2.approx.ftz.f32`. Four lanes sum p: lane i has the columns 2 i and 2 i + 1 of every 8 and its own
    sum l, to which each block's columns are added in ascending order in `sum_chains` interleaved chains, the chains as
    a tree. At the end of a split the lanes are added as a tree. Splits are merged in ascending order into (M, L, O),
    which starts like a split:

        M' = max(M, m),  a = ex2(M - M'),  b = ex2(m - M'),  L' = fma(L, a, l * b),  O' = fma(O, a, o * b)

    and the result is fma(O, 1 / L, +0), rounded once, with the log-sum-exp (M + log2(L)) * ln(2). A query that sees
    nothing has L = 0: zeros and -inf. A query that sees a non-finite value, or whose O overflows, has nan in all of its
    results.

    With a soft cap g, s is t(query @ keys^T * c) instead of the chain, with t(x) = fma(1 / (1 + ex2(x)), -2, 1), which
    is the hyperbolic tangent of x / (2 * log2(e)), by `rcp.approx.ftz.f32`; there c is 2 * log2(e) * scale / g, and
    elsewhere c is g * log2(e). With a bias, s is fma(s, c, bias * log2(e)), its product rounded, and c is 1 afterwards;
    s is -inf where a mask hides a key. With slopes, s is fma(s, c, z * (key position - query position)), its product
    rounded, with z = slope * log2(e), and c is 1 afterwards. A sink enters (M, L) after the last split as a key without
    a value: with z = sink * log2(e)

        M' = max(M, z),  a = ex2(M - M'),  L' = fma(L, a, ex2(z - M'))

    the result is fma(O, a * (1 / L'), +0) and the log-sum-exp is computed from M' and L'. If L is 0 they remain zeros
    and -inf.

    Blocks and splits in which a query sees nothing do not change its bits, so a program may skip them. In a block that
    some queries see partially, a program may replace non-finite values by zeros, and l by nan for the queries that see
    them.

    Attributes:
        key_block: Keys of one block.
        split: Keys of one split, a multiple of `key_block`.
        sum_chains: Interleaved chains in a lane's sum of a block, a power of two.
    """

    ID = "attention/v{version}/f32-wgmma16-keys{key_block}-split{split}-online"
    key_block: int = KEY_BLOCK
    split: int = 1024
    sum_chains: int = 4

    def __post_init__(self) -> None:
        if self.key_block < 8 or self.key_block % 8:
            raise ValueError(f"key_block must be a positive multiple of 8, got {self.key_block}.")
        if self.split < 1 or self.split % self.key_block:
            raise ValueError(f"split must be a positive multiple of key_block={self.key_block}, got {self.split}.")
        if self.sum_chains < 1 or self.sum_chains & (self.sum_chains - 1) or self.sum_chains > self.key_block // 4:
            raise ValueError(f"sum_chains must be a power of two up to key_block / 4, got {self.sum_chains}.")


@dataclass(frozen=True)
class MmaAttentionContract(Contract):
    """How one query attends to its keys on the tensor cores of a GPU without a specialised kernel.

    Operands are multiplied in 16 bits: bfloat16 and float16 values directly, a float32 value as the sum of three
    bfloat16 limbs (rounded, the remainder rounded, its remainder; the remainders of an infinity are nan). Two of these
    have six products: low by high, high by low, middle by middle, middle by high, high by middle, high by high. A chain
    below is one float32 accumulator that adds the products of 16 elements at a time in ascending order, as the tensor
    core adds them; over a head in pieces of 64 elements, of 16 bits 128 (shorter powers of two at its end), with the
    limb products of each piece in order.

    Keys are processed in ascending blocks of `key_block` at the absolute positions 0, key_block, 2 * key_block, ...
    Blocks belong to splits of `split` keys at the absolute positions 0, split, 2 * split, ... A row, a query with one
    of its heads, starts a split with the maximum m = `LEAST`, the sums l = 0 of 8 columns and the values o = 0. With c
    = scale * log2(e), rounded once to float32, a block maps them to

        s  = query @ keys^T                           a chain over the head; -inf where a key is not seen
        m' = max(m, max(s) * c)
        p  = ex2(fma(s, c, -m'))
        a  = ex2(m - m')
        l' = fma(l, a, columns(p))                    columns: the left half of p plus its right half, until 8 are left
        o' = o * a + p @ values                       a chain over the block's keys that starts at o * a, rounded; p in
                                                      the limbs of the operands' dtype

    where ex2 is `ex2.approx.ftz.f32`. At the end of a split the columns of l are halved until one is left. Splits are
    merged in ascending order into (M, L, O), which starts like a split:

        M' = max(M, m),  A = ex2(M - M'),  b = ex2(m - M'),  L' = fma(L, A, l * b),  O' = fma(O, A, o * b)

    The result is O * (1 / L), each rounded to nearest, with the log-sum-exp (M + log2(L)) * ln(2). A row without a
    positive weight has zeros and -inf. A row that sees a non-finite value has nan in all of its results.

    With a soft cap g, a bias, slopes, or a scale of at most 0, s is multiplied by c at once, rounded, and c is 1
    afterwards; the first product is then tanh(query @ keys^T * (scale / g)) * (g * log2(e)) with a cap, both factors
    rounded once to float32. A bias adds bias * log2(e), and slopes then (slope * log2(e)) * (key position - query
    position), each product and sum rounded. After the last split, a sink z maps (M, L, O) to M' = max(M, z * log2(e)),
    L' = L * A + ex2(z * log2(e) - M') and O' = O * A, with A as above.

    In the backward pass p = ex2(fma(s, c, -(lse * log2(e)))) and t = p * (cotangent @ values^T - d) with the sum d of
    cotangent * result. The query gradient is one chain of t @ keys over the key blocks that it sees in ascending order,
    times the scale; the key gradient is one chain of t^T @ queries over blocks of `row_block` of the rows that see it,
    query-major, then by head, times the scale; the value gradient is one chain of p^T @ cotangents. Unseen blocks
    change no bit. Here key blocks hold `row_block` keys. With a soft cap t is first multiplied by 1 - tanh^2; the bias
    gradient is t before that.

    Attributes:
        key_block: Keys of one block, a power of two and at least 16.
        row_block: Rows or keys of one block in the backward pass, the same.
        split: Keys of one split, a multiple of `key_block`.
    """

    ID = "attention/v{version}/f32-mma16-keys{key_block}-rows{row_block}-split{split}-online"
    key_block: int = 64
    row_block: int = 64
    version: int = field(default=3, kw_only=True)
    split: int = 1024

    def __post_init__(self) -> None:
        for name in ("key_block", "row_block"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two and at least 16, got {size}.")
        if self.split < 1 or self.split % self.key_block:
            raise ValueError(f"split must be a positive multiple of key_block={self.key_block}, got {self.split}.")


def mma_attention_contract(dtype: str, head_size: int) -> MmaAttentionContract:
    """Returns the contract of attention on a GPU without a specialised kernel.

    Args:
        dtype: Name of the dtype of queries, keys and values.
        head_size: Width of a head.

    Example:
        >>> mma_attention_contract("float32", 128).id
        'attention/v3/f32-mma16-keys64-rows32-split1024-online'
    """
    if head_size > _MMA_WIDEST:
        # Latents of 576 are served by tiles of their own; other wide heads have small blocks, which fit everywhere.
        latents = head_size > _MMA_LATENTS and dtype != "float32"
        return MmaAttentionContract(64 if latents else 16, 16)
    if dtype != "float32":
        return MmaAttentionContract()
    if head_size > _MMA_WIDE:
        return MmaAttentionContract(32, 16)
    return MmaAttentionContract(64, 32)


_MMA_WIDE: Final = 128
_MMA_WIDEST: Final = 256
_MMA_LATENTS: Final = 512


LEAST: Final = -3e38
"""The maximum before any key: finite, so that differences of maxima are never nan."""


def split_attention_contract(
    head_size: int, dtype: str, value_size: int | None = None
) -> SplitAttentionContract | None:
    """Returns the contract of attention on a Hopper GPU; None if there is no kernel.

    Args:
        head_size: Width of a head.
        dtype: Name of the dtype of queries, keys and values.
        value_size: Width of a head of the values; defaults to the keys' width.

    Example:
        >>> split_attention_contract(128, "bfloat16").id
        'attention/v1/f32-wgmma16-keys128-split1024-online'
        >>> split_attention_contract(192, "bfloat16", 128).id
        'attention/v1/f32-wgmma16-keys64-split1024-online'
        >>> split_attention_contract(128, "float32") is None
        True
    """
    same = value_size is None or value_size == head_size
    served = head_size in SPLIT_HEAD_SIZES if same else (head_size, value_size) in _OTHER_VALUE_SIZES
    if not served or dtype not in ("bfloat16", "float16"):
        return None
    return SplitAttentionContract(key_block=KEY_BLOCK if head_size <= 128 else KEY_BLOCK // 2)


SPLIT_HEAD_SIZES: Final = (64, 96, 128, 192, 256)
"""Head sizes with a kernel on Hopper."""

_OTHER_VALUE_SIZES: Final = ((192, 128),)


@dataclass(frozen=True)
class AttentionGradientContract(Contract):
    """The gradients of attention on a Hopper GPU.

    With c = scale * log2(e), rounded once to float32, the log-sum-exp L of the forward pass times log2(e), the result o
    and its cotangent g in their 16-bit dtype, a query and a key that it sees have

        d  = sum(o * g)                 float32; four lanes, as `SplitAttentionContract` adds weights, then their tree
        s  = query @ key^T              one wgmma chain over the head, steps of 16, float32
        p  = ex2(fma(s, c, -L))
        ds = p * (g @ value^T - d)      the product a chain as that of s

    where ex2 is `ex2.approx.ftz.f32`. Soft cap and slopes enter s and c as in `SplitAttentionContract`, and with a soft
    cap ds has the factor p * fma(t, -t, 1) instead of p, where t is the hyperbolic tangent. A sink is included in L. p
    and ds are 0 for an unseen key, and are rounded to the dtype of the queries before the next products:

        dq = scale * sum over blocks of keys, downwards from the last one, of round(ds) @ keys
        dk = scale * sum over queries of round(ds)^T @ queries
        dv = sum over queries of round(p)^T @ g

    A block's contribution to dq is one wgmma chain over its `key_block` keys in ascending steps of 16; blocks start at
    the absolute positions 0, key_block, 2 * key_block, ..., and their contributions are added in float32. dk and dv are
    one wgmma chain each, over the query heads that share the key head and, in each head, over the queries of the call
    in ascending steps of 16.

    Blocks in which a query sees nothing, and queries that do not see a key, do not change the sums. A query that sees a
    non-finite key or value has nan in its gradient, and so does a key seen by a query with a non-finite query,
    cotangent or result.

    Attributes:
        key_block: Keys of one block.
        sum_chains: Interleaved chains in a lane's sum of d, a power of two.
    """

    key_block: int = KEY_BLOCK
    sum_chains: int = 4

    def __post_init__(self) -> None:
        if self.key_block not in (KEY_BLOCK, KEY_BLOCK // 2):
            raise ValueError(f"key_block must be {KEY_BLOCK} or {KEY_BLOCK // 2}, got {self.key_block}.")
        if (
            self.sum_chains < 1
            or self.sum_chains & (self.sum_chains - 1)
            or self.sum_chains > min(SPLIT_HEAD_SIZES) // 4
        ):
            raise ValueError(f"sum_chains must be a power of two up to 16, got {self.sum_chains}.")

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return (
            f"attention-gradients/v{self.version}/f32-wgmma16-keys{self.key_block}-down-queries-up-weights16-slopes16"
            f"-sums{self.sum_chains}"
        )


def attention_gradient_contract(
    head_size: int, dtype: str, value_size: int | None = None
) -> AttentionGradientContract | None:
    """Returns the contract of the gradients of attention on a Hopper GPU; None if there is no kernel.

    Args:
        head_size: Width of a head.
        dtype: Name of the dtype of queries, keys and values.
        value_size: Width of a head of the values; defaults to the keys' width.

    Example:
        >>> attention_gradient_contract(128, "bfloat16").id
        'attention-gradients/v1/f32-wgmma16-keys128-down-queries-up-weights16-slopes16-sums4'
        >>> attention_gradient_contract(80, "bfloat16") is None
        True
    """
    if split_attention_contract(head_size, dtype, value_size) is None:
        return None
    return AttentionGradientContract(key_block=KEY_BLOCK if head_size <= 128 else KEY_BLOCK // 2)
