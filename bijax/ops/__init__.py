"""Batch-invariant operations, differentiable and under every JAX transformation."""

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
from bijax.ops.matmul.product import weight_gradient as weight_gradient
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
from bijax.ops.rows.reductions import mean as mean
from bijax.ops.rows.reductions import sum as sum
from bijax.ops.rows.softmax import log_softmax as log_softmax
from bijax.ops.rows.softmax import logsumexp as logsumexp
from bijax.ops.rows.softmax import softmax as softmax
from bijax.ops.rows.variance import std as std
from bijax.ops.rows.variance import var as var
