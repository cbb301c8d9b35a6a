"""Batch-invariant operations, differentiable and under every JAX transformation."""

from bijax.ops._delta_rule_arguments import DeltaRuleState as DeltaRuleState
from bijax.ops.attention import dot_product_attention as dot_product_attention
from bijax.ops.attention_block_size import AttentionBlockSize as AttentionBlockSize
from bijax.ops.attention_block_size import (
    get_batch_invariant_attention_block_size as get_batch_invariant_attention_block_size,
)
from bijax.ops.causal_conv import causal_conv1d as causal_conv1d
from bijax.ops.causal_conv import causal_conv1d_extend as causal_conv1d_extend
from bijax.ops.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from bijax.ops.delta_rule import gated_delta_rule as gated_delta_rule
from bijax.ops.delta_rule import gated_delta_rule_extend as gated_delta_rule_extend
from bijax.ops.elementwise import elementwise as elementwise
from bijax.ops.embed import embed as embed
from bijax.ops.flash_attention import flash_attention as flash_attention
from bijax.ops.flash_attention import flash_decoding as flash_decoding
from bijax.ops.flash_paged import flash_attention_decode as flash_attention_decode
from bijax.ops.flash_paged import flash_attention_prefill as flash_attention_prefill
from bijax.ops.gated_matmul import gated_matmul as gated_matmul
from bijax.ops.gated_norm import gated_rms_norm as gated_rms_norm
from bijax.ops.gated_norm import l2_norm as l2_norm
from bijax.ops.head_norm import head_rms_norm as head_rms_norm
from bijax.ops.kv_cache import store_kv_cache as store_kv_cache
from bijax.ops.kv_cache import store_paged_kv_cache as store_paged_kv_cache
from bijax.ops.matmul import matmul as matmul
from bijax.ops.matmul import weight_gradient as weight_gradient
from bijax.ops.moe_gather import moe_gather as moe_gather
from bijax.ops.moe_products import group_matmul as group_matmul
from bijax.ops.moe_products import moe_quant_group_gemm as moe_quant_group_gemm
from bijax.ops.moe_products import moe_quant_matmul as moe_quant_matmul
from bijax.ops.moe_routing import moe_gating_gemm as moe_gating_gemm
from bijax.ops.moe_routing import moe_softmax_topk as moe_softmax_topk
from bijax.ops.moe_scatter import moe_scatter as moe_scatter
from bijax.ops.moe_scatter import moe_scatter_dynamic_quant as moe_scatter_dynamic_quant
from bijax.ops.norm import layer_norm as layer_norm
from bijax.ops.norm import rms_norm as rms_norm
from bijax.ops.paged_attention import paged_attention as paged_attention
from bijax.ops.quant_matmul import quant_matmul as quant_matmul
from bijax.ops.quantize import add_rms_norm_dynamic_quant as add_rms_norm_dynamic_quant
from bijax.ops.quantize import scale_dynamic_quant as scale_dynamic_quant
from bijax.ops.reductions import mean as mean
from bijax.ops.reductions import sum as sum
from bijax.ops.rotary import rotary_embedding as rotary_embedding
from bijax.ops.softmax import log_softmax as log_softmax
from bijax.ops.softmax import logsumexp as logsumexp
from bijax.ops.softmax import softmax as softmax
from bijax.ops.swiglu import moe_swiglu_dynamic_quant as moe_swiglu_dynamic_quant
from bijax.ops.swiglu import swiglu as swiglu
from bijax.ops.variance import std as std
from bijax.ops.variance import var as var
