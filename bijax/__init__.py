"""Batch-invariant JAX: a row gets the same bits whatever else is in the batch.

Names are imported when they are first used, so that `import bijax` and the command line do not wait for JAX.
"""

import importlib
import importlib.metadata
import importlib.util
import typing

if typing.TYPE_CHECKING:
    from bijax import ops as ops
    from bijax.core.architecture import lowering_for as lowering_for
    from bijax.core.architecture import prefer_backend as prefer_backend
    from bijax.inspect.audit import audit as audit
    from bijax.inspect.audit_report import Audit as Audit
    from bijax.inspect.contracts import Manifest as Manifest
    from bijax.inspect.contracts import contracts as contracts
    from bijax.ops.attention.block_size import AttentionBlockSize as AttentionBlockSize
    from bijax.ops.attention.block_size import (
        get_batch_invariant_attention_block_size as get_batch_invariant_attention_block_size,
    )
    from bijax.ops.attention.dot_product import dot_product_attention as dot_product_attention
    from bijax.ops.attention.flash import flash_attention as flash_attention
    from bijax.ops.attention.flash import flash_decoding as flash_decoding
    from bijax.ops.attention.flash_paged import flash_attention_decode as flash_attention_decode
    from bijax.ops.attention.flash_paged import flash_attention_prefill as flash_attention_prefill
    from bijax.ops.attention.latent import latent_attention as latent_attention
    from bijax.ops.attention.latent import paged_latent_attention as paged_latent_attention
    from bijax.ops.attention.paged import paged_attention as paged_attention
    from bijax.ops.delta_rule._arguments import DeltaRuleState as DeltaRuleState
    from bijax.ops.delta_rule.causal_conv import causal_conv1d as causal_conv1d
    from bijax.ops.delta_rule.causal_conv import causal_conv1d_extend as causal_conv1d_extend
    from bijax.ops.delta_rule.rule import gated_delta_rule as gated_delta_rule
    from bijax.ops.delta_rule.rule import gated_delta_rule_extend as gated_delta_rule_extend
    from bijax.ops.elementwise.call import elementwise as elementwise
    from bijax.ops.elementwise.swiglu import moe_swiglu_dynamic_quant as moe_swiglu_dynamic_quant
    from bijax.ops.elementwise.swiglu import swiglu as swiglu
    from bijax.ops.embed import embed as embed
    from bijax.ops.kv_cache.latent import store_latent_cache as store_latent_cache
    from bijax.ops.kv_cache.latent import store_paged_latent_cache as store_paged_latent_cache
    from bijax.ops.kv_cache.store import store_kv_cache as store_kv_cache
    from bijax.ops.kv_cache.store import store_paged_kv_cache as store_paged_kv_cache
    from bijax.ops.matmul.gated import gated_matmul as gated_matmul
    from bijax.ops.matmul.product import matmul as matmul
    from bijax.ops.moe.gather import moe_gather as moe_gather
    from bijax.ops.moe.products import group_matmul as group_matmul
    from bijax.ops.moe.products import moe_quant_group_gemm as moe_quant_group_gemm
    from bijax.ops.moe.products import moe_quant_matmul as moe_quant_matmul
    from bijax.ops.moe.routing import moe_gating_gemm as moe_gating_gemm
    from bijax.ops.moe.routing import moe_softmax_topk as moe_softmax_topk
    from bijax.ops.moe.scatter import moe_scatter as moe_scatter
    from bijax.ops.moe.scatter import moe_scatter_dynamic_quant as moe_scatter_dynamic_quant
    from bijax.ops.norm.gated import gated_rms_norm as gated_rms_norm
    from bijax.ops.norm.gated import l2_norm as l2_norm
    from bijax.ops.norm.head import head_rms_norm as head_rms_norm
    from bijax.ops.norm.norms import layer_norm as layer_norm
    from bijax.ops.norm.norms import rms_norm as rms_norm
    from bijax.ops.quantized.dynamic import add_rms_norm_dynamic_quant as add_rms_norm_dynamic_quant
    from bijax.ops.quantized.dynamic import scale_dynamic_quant as scale_dynamic_quant
    from bijax.ops.quantized.matmul import quant_matmul as quant_matmul
    from bijax.ops.rotary.embedding import rotary_embedding as rotary_embedding
    from bijax.ops.rows.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
    from bijax.ops.rows.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from bijax.ops.rows.reductions import mean as mean
    from bijax.ops.rows.reductions import sum as sum
    from bijax.ops.rows.softmax import log_softmax as log_softmax
    from bijax.ops.rows.softmax import logsumexp as logsumexp
    from bijax.ops.rows.softmax import softmax as softmax
    from bijax.ops.rows.variance import std as std
    from bijax.ops.rows.variance import var as var
    from bijax.transform import GradientSum as GradientSum
    from bijax.transform import NotInvariantError as NotInvariantError
    from bijax.transform import accumulate_gradients as accumulate_gradients
    from bijax.transform import disable_batch_invariant_mode as disable_batch_invariant_mode
    from bijax.transform import enable_batch_invariant_mode as enable_batch_invariant_mode
    from bijax.transform import is_batch_invariant_mode_enabled as is_batch_invariant_mode_enabled
    from bijax.transform import set_batch_invariant_mode as set_batch_invariant_mode
    from bijax.transform.invariant import invariant as invariant
    from pallas_kernels.errors import UnsupportedError as UnsupportedError

_NAMES = {
    "bijax.core.architecture": "lowering_for prefer_backend",
    "bijax.inspect.audit": "audit",
    "bijax.inspect.audit_report": "Audit",
    "bijax.inspect.contracts": "Manifest contracts",
    "bijax.ops.attention.block_size": "AttentionBlockSize get_batch_invariant_attention_block_size",
    "bijax.ops.attention.dot_product": "dot_product_attention",
    "bijax.ops.attention.flash": "flash_attention flash_decoding",
    "bijax.ops.attention.flash_paged": "flash_attention_decode flash_attention_prefill",
    "bijax.ops.attention.latent": "latent_attention paged_latent_attention",
    "bijax.ops.attention.paged": "paged_attention",
    "bijax.ops.delta_rule._arguments": "DeltaRuleState",
    "bijax.ops.delta_rule.causal_conv": "causal_conv1d causal_conv1d_extend",
    "bijax.ops.delta_rule.rule": "gated_delta_rule gated_delta_rule_extend",
    "bijax.ops.elementwise.call": "elementwise",
    "bijax.ops.elementwise.swiglu": "moe_swiglu_dynamic_quant swiglu",
    "bijax.ops.embed": "embed",
    "bijax.ops.kv_cache.latent": "store_latent_cache store_paged_latent_cache",
    "bijax.ops.kv_cache.store": "store_kv_cache store_paged_kv_cache",
    "bijax.ops.matmul.gated": "gated_matmul",
    "bijax.ops.matmul.product": "matmul",
    "bijax.ops.moe.gather": "moe_gather",
    "bijax.ops.moe.products": "group_matmul moe_quant_group_gemm moe_quant_matmul",
    "bijax.ops.moe.routing": "moe_gating_gemm moe_softmax_topk",
    "bijax.ops.moe.scatter": "moe_scatter moe_scatter_dynamic_quant",
    "bijax.ops.norm.gated": "gated_rms_norm l2_norm",
    "bijax.ops.norm.head": "head_rms_norm",
    "bijax.ops.norm.norms": "layer_norm rms_norm",
    "bijax.ops.quantized.dynamic": "add_rms_norm_dynamic_quant scale_dynamic_quant",
    "bijax.ops.quantized.matmul": "quant_matmul",
    "bijax.ops.rotary.embedding": "rotary_embedding",
    "bijax.ops.rows.cross_entropy": "softmax_cross_entropy",
    "bijax.ops.rows.linear_cross_entropy": "linear_cross_entropy",
    "bijax.ops.rows.reductions": "mean sum",
    "bijax.ops.rows.softmax": "log_softmax logsumexp softmax",
    "bijax.ops.rows.variance": "std var",
    "bijax.transform": "GradientSum NotInvariantError accumulate_gradients disable_batch_invariant_mode"
    " enable_batch_invariant_mode is_batch_invariant_mode_enabled set_batch_invariant_mode",
    "bijax.transform.invariant": "invariant",
    "pallas_kernels.errors": "UnsupportedError",
}
"""The public names by the module that defines them; the imports above are the same for type checkers."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        value: typing.Any = _version()
    elif module := _MODULES.get(name):
        value = getattr(importlib.import_module(module), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(({*globals(), *_MODULES, "__version__", "ops"}) - {"importlib", "typing"})


def _version() -> str:
    try:
        return importlib.metadata.version("batch-invariant-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+uninstalled"
