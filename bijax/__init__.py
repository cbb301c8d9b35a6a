"""Batch-invariant JAX: a row gets the same bits whatever else is in the batch."""

from bijax import ops as ops
from bijax.core.architecture import lowering_for as lowering_for
from bijax.ops.attention import dot_product_attention as dot_product_attention
from bijax.ops.attention_block_size import AttentionBlockSize as AttentionBlockSize
from bijax.ops.attention_block_size import (
    get_batch_invariant_attention_block_size as get_batch_invariant_attention_block_size,
)
from bijax.ops.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from bijax.ops.elementwise import elementwise as elementwise
from bijax.ops.embed import embed as embed
from bijax.ops.gated_matmul import gated_matmul as gated_matmul
from bijax.ops.head_norm import head_rms_norm as head_rms_norm
from bijax.ops.kv_cache import store_kv_cache as store_kv_cache
from bijax.ops.kv_cache import store_paged_kv_cache as store_paged_kv_cache
from bijax.ops.matmul import matmul as matmul
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
from bijax.transform import Audit as Audit
from bijax.transform import GradientSum as GradientSum
from bijax.transform import Manifest as Manifest
from bijax.transform import NotInvariantError as NotInvariantError
from bijax.transform import accumulate_gradients as accumulate_gradients
from bijax.transform import audit as audit
from bijax.transform import contracts as contracts
from bijax.transform import disable_batch_invariant_mode as disable_batch_invariant_mode
from bijax.transform import enable_batch_invariant_mode as enable_batch_invariant_mode
from bijax.transform import invariant as invariant
from bijax.transform import is_batch_invariant_mode_enabled as is_batch_invariant_mode_enabled
from bijax.transform import set_batch_invariant_mode as set_batch_invariant_mode
from pallas_kernels.errors import UnsupportedError as UnsupportedError
