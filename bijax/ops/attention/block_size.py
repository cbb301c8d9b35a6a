"""The block sizes of attention, for programs that ask for them."""

from typing import NamedTuple

from pallas_kernels.contract import attention_contract


class AttentionBlockSize(NamedTuple):
    """Sizes of the blocks in which attention adds.

    Attributes:
        block_m: Queries of a block, in the sums over queries of the backward pass.
        block_n: Keys of a block.
    """

    block_m: int
    block_n: int


def get_batch_invariant_attention_block_size() -> AttentionBlockSize:
    """Returns the blocks that attention's contract fixes, which do not depend on the batch.

    Key blocks start at the absolute positions 0, `block_n`, 2 * `block_n`, ..., and query blocks likewise. The sizes
    are taken from `pallas_kernels.contract.attention_contract()`, the CPU contract. GPU kernels state theirs in their
    own contracts (`SplitAttentionContract`, `MmaAttentionContract`).

    Source: SGLang's function of that name (https://github.com/sgl-project/sglang), which has (16, 16).

    Example:
        >>> get_batch_invariant_attention_block_size()
        AttentionBlockSize(block_m=16, block_n=128)
    """
    contract = attention_contract()
    return AttentionBlockSize(contract.query_block, contract.key_block)
