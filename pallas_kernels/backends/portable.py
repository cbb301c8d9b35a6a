"""XLA programs: with fixed shapes, for CPUs and any NVIDIA GPU, or specialised for one of the two.

On a GPU they serve what no kernel of another backend does: everything on GPUs before Ampere, and where the packages of
the kernels in Triton are missing.
"""

from typing import Final

from pallas_kernels.contract import (
    XLA_FUNCTIONS,
    DeltaRuleContract,
    FoldContract,
    ProductSpec,
    RoundedChunkContract,
    RoundedMatmulContract,
    TreeContract,
    attention_contract,
    chunk_contract,
    rounded_contract,
    row_contract,
)
from pallas_kernels.registry import Kernel

_ON: Final = ("cpu", "cuda")
_OPS: Final = "pallas_kernels"
_CONV: Final = f"{_OPS}.causal_conv.portable"
_RULE: Final = f"{_OPS}.delta_rule"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()
_TREE: Final = TreeContract()
_SCATTER: Final = FoldContract("scatter")
_DELTA: Final = DeltaRuleContract()

_ATTENTION: Final = f"{_OPS}.attention.portable"
_ROUNDED: Final = attention_contract(fused=False)


def _products(product: ProductSpec) -> RoundedMatmulContract | None:
    return rounded_contract(product) if product.dtype else None


def _chunks_of_products(product: ProductSpec) -> RoundedChunkContract | None:
    return RoundedChunkContract() if product.dtype and not product.is_wide else None


KERNELS: Final = (
    Kernel("matmul", "cuda", f"{_OPS}.matmul.portable:matmul", _products),
    Kernel("weight_gradient", "cuda", f"{_OPS}.matmul.portable:weight_gradient", _chunks_of_products),
    Kernel("attention", "cuda", f"{_ATTENTION}:attention", _ROUNDED, XLA_FUNCTIONS),
    Kernel("attention_gradients", "cuda", f"{_ATTENTION}:gradients", _ROUNDED, XLA_FUNCTIONS),
    Kernel("attention_score_gradients", "cuda", f"{_ATTENTION}:score_gradients", _ROUNDED, XLA_FUNCTIONS),
    Kernel("rms_norm", _ON, f"{_OPS}.norm.portable:rms_norm", _ROWS),
    Kernel("rms_norm_gradient", _ON, f"{_OPS}.norm.portable:rms_norm_gradient", _ROWS),
    Kernel("layer_norm", _ON, f"{_OPS}.norm.portable:layer_norm", _ROWS),
    Kernel("layer_norm_gradient", _ON, f"{_OPS}.norm.portable:layer_norm_gradient", _ROWS),
    Kernel("norm_weight_gradient", _ON, f"{_OPS}.norm.portable:weight_gradient", _CHUNKS),
    Kernel("gated_delta_rule", _ON, f"{_RULE}.portable:gated_delta_rule", _DELTA, XLA_FUNCTIONS),
    Kernel("gated_delta_rule_extend", _ON, f"{_RULE}.portable:gated_delta_rule_extend", _DELTA, XLA_FUNCTIONS),
    Kernel("gated_delta_rule_gradients", _ON, f"{_RULE}.gradients:gated_delta_rule_gradients", _DELTA, XLA_FUNCTIONS),
    Kernel("softmax", _ON, f"{_OPS}.softmax.portable:softmax", _ROWS, XLA_FUNCTIONS),
    Kernel("softmax_gradient", _ON, f"{_OPS}.softmax.portable:softmax_gradient", _ROWS),
    Kernel("log_softmax", _ON, f"{_OPS}.softmax.portable:log_softmax", _ROWS, XLA_FUNCTIONS),
    Kernel("log_softmax_gradient", _ON, f"{_OPS}.softmax.portable:log_softmax_gradient", _ROWS, XLA_FUNCTIONS),
    Kernel("logsumexp", _ON, f"{_OPS}.softmax.portable:logsumexp", _ROWS, XLA_FUNCTIONS),
    Kernel("logsumexp_gradient", _ON, f"{_OPS}.softmax.portable:logsumexp_gradient", None, XLA_FUNCTIONS),
    Kernel("cross_entropy", _ON, f"{_OPS}.cross_entropy.portable:cross_entropy", _ROWS, XLA_FUNCTIONS),
    Kernel("cross_entropy_gradient", _ON, f"{_OPS}.cross_entropy.portable:cross_entropy_gradient", None, XLA_FUNCTIONS),
    Kernel("sum_axis", _ON, f"{_OPS}.rows.portable:sum_axis", _ROWS),
    Kernel("tree_sum", "cpu", f"{_OPS}.rows.tree:tree_sum", _TREE),
    Kernel("tree_sum", "cuda", f"{_OPS}.rows.tree:tree_sum_on_gpu", _TREE),
    Kernel("sum_rows", _ON, f"{_OPS}.rows.portable:sum_rows", _CHUNKS),
    Kernel("variance", _ON, f"{_OPS}.rows.portable:variance", _ROWS),
    Kernel("variance_gradient", _ON, f"{_OPS}.rows.portable:variance_gradient", None, XLA_FUNCTIONS),
    Kernel("quantize", _ON, f"{_OPS}.quantize.portable:quantize"),
    Kernel("quantize_swiglu", _ON, f"{_OPS}.quantize.portable:quantize_swiglu", None, XLA_FUNCTIONS),
    Kernel("quantize_norm", _ON, f"{_OPS}.quantize.portable:quantize_norm", _ROWS),
    Kernel("largest", "cpu", f"{_OPS}.topk.cpu:largest"),
    Kernel("largest", "cuda", f"{_OPS}.topk.portable:largest"),
    Kernel("sort_by_expert", _ON, f"{_OPS}.expert_rows.portable:sort_by_expert"),
    Kernel("rows_by_count", _ON, f"{_OPS}.expert_rows.portable:rows_by_count"),
    Kernel("rows_of_tokens", _ON, f"{_OPS}.expert_rows.portable:rows_of_tokens"),
    Kernel("add_expert_rows", "cpu", f"{_OPS}.expert_rows.portable:add_expert_rows", None, XLA_FUNCTIONS),
    Kernel("add_expert_rows", "cuda", f"{_OPS}.expert_rows.portable:add_expert_rows_on_gpu", None, XLA_FUNCTIONS),
    Kernel("pick_rows", "cpu", f"{_OPS}.pick.cpu:pick_rows"),
    Kernel("pick_rows", "cuda", f"{_OPS}.pick.portable:pick_rows"),
    Kernel("embed_gradient", "cpu", f"{_OPS}.embedding.portable:table_gradient", _CHUNKS),
    Kernel("embed_gradient", "cuda", f"{_OPS}.embedding.rounds:table_gradient", _CHUNKS),
    Kernel("scatter", "cpu", f"{_OPS}.scatter.portable:scatter_windows", _SCATTER),
    Kernel("scatter", "cuda", f"{_OPS}.scatter.rounds:scatter_rounds", _SCATTER),
    Kernel("elementwise", "cpu", f"{_OPS}.elementwise.portable:elementwise", None, XLA_FUNCTIONS),
    Kernel("elementwise", "cuda", f"{_OPS}.elementwise.portable:elementwise_on_gpu", None, XLA_FUNCTIONS),
    Kernel("causal_conv", "cpu", f"{_CONV}:causal_conv", None, XLA_FUNCTIONS),
    Kernel("causal_conv", "cuda", f"{_CONV}:causal_conv_on_gpu", None, XLA_FUNCTIONS),
    Kernel("causal_conv_extend", "cpu", f"{_CONV}:causal_conv_extend", None, XLA_FUNCTIONS),
    Kernel("causal_conv_extend", "cuda", f"{_CONV}:causal_conv_extend_on_gpu", None, XLA_FUNCTIONS),
    Kernel("rotate", "cpu", f"{_OPS}.rotary.portable:rotate", None, XLA_FUNCTIONS),
    Kernel("rotate", "cuda", f"{_OPS}.rotary.portable:rotate_on_gpu", None, XLA_FUNCTIONS),
    Kernel("rotate_and_store", "cpu", f"{_OPS}.rotary.portable:rotate_and_store", None, XLA_FUNCTIONS),
    Kernel("rotate_and_store", "cuda", f"{_OPS}.rotary.portable:rotate_and_store_on_gpu", None, XLA_FUNCTIONS),
)
