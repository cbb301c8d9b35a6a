"""Kernels of Pallas's lowering to Triton, for any NVIDIA GPU."""

from typing import Final

from pallas_kernels.contract import (
    GUMBEL,
    XLA_FUNCTIONS,
    ChunkContract,
    MatmulContract,
    MmaAttentionContract,
    ProductSpec,
    chain_contract,
    chunk_contract,
    mma_attention_contract,
)
from pallas_kernels.registry import Kernel

_ON: Final = "cuda"
_OPS: Final = "pallas_kernels"


def _chains(product: ProductSpec) -> MatmulContract | None:
    return chain_contract(product) if product.dtype else None


def _chunks(product: ProductSpec) -> ChunkContract | None:
    return chunk_contract() if product.dtype else None


def _attention(widths: tuple[int, str, int]) -> MmaAttentionContract:
    size, dtype, value_size = widths
    return mma_attention_contract(dtype, max(size, value_size))


KERNELS: Final = (
    Kernel("matmul", _ON, f"{_OPS}.matmul.pallas_triton:product", _chains),
    Kernel("weight_gradient", _ON, f"{_OPS}.matmul.pallas_triton:product_gradient", _chunks),
    Kernel("largest", _ON, f"{_OPS}.topk.pallas_triton:largest"),
    Kernel("sort_by_expert", _ON, f"{_OPS}.expert_rows.pallas_triton:sort_by_expert"),
    Kernel("rows_by_count", _ON, f"{_OPS}.expert_rows.pallas_triton:rows_by_count"),
    Kernel("rows_of_tokens", _ON, f"{_OPS}.expert_rows.pallas_triton:rows_of_tokens"),
    Kernel("pick_rows", _ON, f"{_OPS}.pick.pallas_triton:pick_rows"),
    Kernel("rotate_and_store", _ON, f"{_OPS}.rotary.pallas_triton:rotate_and_store", None, XLA_FUNCTIONS),
    Kernel("draw", _ON, f"{_OPS}.sampling.pallas_triton:draw", GUMBEL),
    Kernel("attention", _ON, f"{_OPS}.attention.pallas_triton:attention", _attention),
    Kernel("attention_gradients", _ON, f"{_OPS}.attention.pallas_triton:gradients", _attention),
    Kernel("attention_score_gradients", _ON, f"{_OPS}.attention.pallas_triton:score_gradients", _attention),
)
