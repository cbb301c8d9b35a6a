"""Cases that `make test` leaves to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG_DOCTESTS = frozenset(
    {
        "bijax.lax.conv.conv_general_dilated",
        "bijax.lax.cumulative.cumlogsumexp",
        "bijax.lax.cumulative.cumsum",
        "bijax.lax.ragged_dot.ragged_dot_general",
        "bijax.lax.reduce.reduce_max",
        "bijax.lax.reduce.reduce_min",
        "bijax.lax.reduce.reduce_sum",
        "bijax.lax.windows.reduce_window_min",
        "bijax.ops.attention.dot_product_attention",
        "bijax.ops.kv_cache.store_kv_cache",
        "bijax.ops.matmul.matmul",
        "bijax.ops.matmul.weight_gradient",
        "bijax.ops.moe_gather.moe_gather",
        "bijax.ops.moe_products.group_matmul",
        "bijax.ops.moe_products.moe_quant_group_gemm",
        "bijax.ops.moe_routing.moe_softmax_topk",
        "bijax.ops.moe_scatter.moe_scatter",
        "bijax.ops.moe_scatter.moe_scatter_dynamic_quant",
        "bijax.ops.paged_attention.paged_attention",
        "bijax.ops.quantize.add_rms_norm_dynamic_quant",
        "bijax.ops.rotary.rotary_embedding",
        "bijax.sampling._multinomial.multinomial_with_seed",
        "bijax.sampling._sample.sample",
        "bijax.serving.async_engine.AsyncEngine",
        "bijax.testing._sweep.assert_batch_invariant",
        "bijax.transform.accumulate.accumulate_gradients",
        "bijax.transform.invariant.invariant",
        "flax_layers.checkpoint.load.load_checkpoint",
        "flax_layers.checkpoint.tokenizer.Tokenizer",
        "flax_layers.checkpoint.tokenizer.Tokenizer.token_bytes",
        "flax_layers.conversion.convert.convert",
        "flax_layers.linen._drop_in.invariant_layer",
        "flax_layers.linen.attention.MultiHeadAttention",
        "flax_layers.linen.linear.Conv",
        "flax_layers.linen.linear.ConvLocal",
        "flax_layers.linen.linear.Dense",
        "flax_layers.linen.linear.DenseGeneral",
        "flax_layers.linen.linear.Embed",
        "flax_layers.linen.normalization.GroupNorm",
        "flax_layers.linen.normalization.LayerNorm",
        "flax_layers.linen.normalization.SpectralNorm",
        "flax_layers.linen.recurrent.Bidirectional",
        "flax_layers.linen.recurrent.ConvLSTMCell",
        "flax_layers.linen.recurrent.GRUCell",
        "flax_layers.linen.recurrent.OptimizedLSTMCell",
        "flax_layers.linen.recurrent.RNN",
        "flax_layers.linen.stochastic.Dropout",
        "flax_layers.models.generate.generate",
        "flax_layers.models.layers.attention.Attention",
        "flax_layers.models.layers.embed.Embed",
        "flax_layers.models.layers.linear.Linear",
        "flax_layers.models.layers.mlp.MLP",
        "flax_layers.models.layers.moe.MoE",
        "flax_layers.models.layers.quant_moe.QuantMoE",
        "flax_layers.models.llama.Llama",
        "flax_layers.nnx.attention.MultiHeadAttention",
        "flax_layers.nnx.attention.RoPE",
        "flax_layers.nnx.linear.Conv",
        "flax_layers.nnx.linear.Einsum",
        "flax_layers.nnx.linear.LinearGeneral",
        "flax_layers.nnx.linear.LoRA",
        "flax_layers.nnx.normalization.SpectralNorm",
        "flax_layers.nnx.recurrent.Bidirectional",
        "flax_layers.nnx.recurrent.LSTMCell",
        "flax_layers.nnx.recurrent.OptimizedLSTMCell",
        "flax_layers.ops.invariant.InvariantOps",
        "pallas_kernels.ops.attention.cpu.launch.attention",
        "pallas_kernels.ops.attention.triton.launch.attention",
        "pallas_kernels.ops.cumulative.portable.scan_axis",
        "pallas_kernels.ops.matmul.cpu.launch.matmul",
        "pallas_kernels.ops.matmul.cpu.stacked.matmul",
        "pallas_kernels.ops.matmul.hopper.bf16x6.matmul",
        "pallas_kernels.ops.matmul.hopper.bf16x6.weight_gradient",
        "pallas_kernels.ops.matmul.hopper.launch.gated_matmul",
        "pallas_kernels.ops.matmul.hopper.launch.matmul",
        "pallas_kernels.ops.matmul.hopper.launch.weight_gradient",
        "pallas_kernels.ops.matmul.hopper.tf32.matmul",
        "pallas_kernels.ops.matmul.triton.weight_gradient",
        "pallas_kernels.ops.norm.portable.layer_norm",
        "pallas_kernels.ops.norm.portable.weight_gradient",
        "pallas_kernels.ops.rows.fold.choose_axis",
        "pallas_kernels.ops.rows.portable.sum_axis",
    }
)
"""Examples of docstrings that compile for seconds and that do what other tests do too."""


def rarely(*values: Any) -> Any:
    """Returns parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def sampled[T](cases: Iterable[T], few: Collection[T]) -> list[Any]:
    """Returns all cases; those that are not among the few are left to `make test-all`."""
    cases = list(cases)
    assert all(case in cases for case in few)
    return [case if case in few else rarely(case) for case in cases]
