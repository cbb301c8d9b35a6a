"""The contract of attention: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final

KEY_BLOCK: Final = 128
"""Keys in one block of attention; blocks start at the absolute positions 0, 128, 256, ..."""

QUERY_BLOCK: Final = 16
"""Queries in one block of attention's sums over queries; blocks start at the absolute positions 0, 16, 32, ..."""

_ATTENTION_CHAIN: Final = 128


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


def attention_contract() -> AttentionContract:
    """Returns the contract of attention, the same for every head size and cache layout."""
    return AttentionContract()
