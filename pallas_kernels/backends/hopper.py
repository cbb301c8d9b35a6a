"""Mosaic kernels for Hopper GPUs."""

from typing import Any, Final

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    AttentionGradientContract,
    ElementwiseContract,
    Float8Contract,
    MmaAttentionContract,
    PartsChunkContract,
    PartsContract,
    ProductSpec,
    QuantContract,
    SplitAttentionContract,
    SplitChunkContract,
    SplitContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
    attention_gradient_contract,
    chunk_contract,
    mma_attention_contract,
    online_row_contract,
    row_contract,
    split_attention_contract,
    split_contract,
)
from pallas_kernels.registry import Kernel

_ON: Final = "sm_90"
_OPS: Final = "pallas_kernels"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()
_MATMUL: Final = f"{_OPS}.matmul.hopper"
_ATTENTION_ARRAYS: Final = frozenset(
    ("page_table", "alibi_slopes", "sinks", "key_scale", "value_scale", "common_prefix", "bias", "mask")
)
"""The optional arrays that attention reads; calls with others are left to the kernels of other targets."""
_16_BITS: Final = ("bfloat16", "float16")
_LATENT_SIZES: Final = (576, 512)
"""Columns of a latent and of its values with a kernel of their own."""


def _wgmma(product: ProductSpec) -> WgmmaContract | None:
    return WgmmaContract() if product.dtype in _16_BITS else None


def _split_wgmma(product: ProductSpec) -> SplitWgmmaContract | None:
    return SplitWgmmaContract(product.splits) if product.dtype in _16_BITS else None


def _fused(product: ProductSpec) -> WgmmaContract | SplitWgmmaContract | None:
    return _wgmma(product) if product.splits == 1 else _split_wgmma(product)


def _of_activation(product: ProductSpec) -> ElementwiseContract | None:
    return PTX_FUNCTIONS if product.activation in ("gelu", "silu") else None


def _tf32(product: ProductSpec) -> Tf32Contract | None:
    return Tf32Contract() if product.dtype == "float32" and product.in_tf32 else None


def _bf16x6(product: ProductSpec) -> SplitContract | None:
    return split_contract(product.k) if product.dtype == "float32" and not product.in_tf32 else None


def _parts(product: ProductSpec) -> PartsContract | None:
    return PartsContract(product.parts) if product.is_mixed else None


def _wgmma_chunks(product: ProductSpec) -> WgmmaChunkContract | None:
    return WgmmaChunkContract() if product.dtype in _16_BITS else None


def _bf16x6_chunks(product: ProductSpec) -> SplitChunkContract | None:
    return SplitChunkContract() if product.dtype == "float32" else None


def _parts_chunks(product: ProductSpec) -> PartsChunkContract | None:
    return PartsChunkContract(product.parts) if product.is_mixed else None


def _quantized(dtype: str) -> QuantContract | Float8Contract:
    return QuantContract() if dtype == "int8" else Float8Contract("wgmma32")


def _attention(widths: tuple[int, str, int]) -> SplitAttentionContract | None:
    return split_attention_contract(*widths)


def _latents(widths: tuple[int, str, int]) -> MmaAttentionContract | None:
    size, dtype, value_size = widths
    served = (size, value_size) == _LATENT_SIZES and dtype in _16_BITS
    return mma_attention_contract(dtype, size) if served else None


def _attention_gradients(widths: tuple[int, str, int]) -> AttentionGradientContract | None:
    return attention_gradient_contract(*widths)


def _reads_all(call: Any, *_: Any, arrays: frozenset[str] = _ATTENTION_ARRAYS, **__: Any) -> bool:
    from pallas_kernels.attention.schedule.hopper import takes_scores  # when the target has matched

    takes = call.value is not None and takes_scores(call.options.scale, call.options.soft_cap)
    return takes and arrays.issuperset(call.present)


def _reads_latents(call: Any, *_: Any, **__: Any) -> bool:
    from pallas_kernels.attention.schedule.hopper_latents import takes_latents  # when the target has matched

    return takes_latents(call)


def _reads_once(h: Any, factor: Any, g: Any, weight: Any = None, g_sum: Any = None, **_: Any) -> bool:
    """Whether one launch for both gradients is faster than two, which have the same bits: many rows of some lengths."""
    from pallas_kernels.schedule.hopper.norm_gradients import gradients_schedule  # when the target has matched

    two = weight is not None and g_sum is None  # with a third array it was not measured
    rows, columns = h.shape
    return two and gradients_schedule(rows, columns, (h.dtype.itemsize, g.dtype.itemsize)) is not None


KERNELS: Final = (
    Kernel("matmul", _ON, f"{_MATMUL}.launch:matmul", _wgmma),
    Kernel("matmul", _ON, f"{_MATMUL}.tf32:matmul", _tf32),
    Kernel("matmul", _ON, f"{_MATMUL}.bf16x6:matmul", _bf16x6),
    Kernel("matmul", _ON, f"{_MATMUL}.parts:matmul", _parts),
    Kernel("split_matmul", _ON, f"{_MATMUL}.launch:matmul", _split_wgmma),
    Kernel("fused_matmul", _ON, f"{_MATMUL}.launch:matmul", _fused, _of_activation),
    Kernel("gated_matmul", _ON, f"{_MATMUL}.launch:gated_matmul", _fused, _of_activation),
    Kernel("weight_gradient", _ON, f"{_MATMUL}.launch:weight_gradient", _wgmma_chunks),
    Kernel("weight_gradient", _ON, f"{_MATMUL}.bf16x6:weight_gradients", _bf16x6_chunks),
    Kernel("weight_gradient", _ON, f"{_MATMUL}.parts:weight_gradient", _parts_chunks),
    Kernel("matmul_of_parts", _ON, f"{_MATMUL}.parts:matmul_of_parts", PartsContract),
    Kernel("chains_of_parts", _ON, f"{_MATMUL}.parts_in_turn:chains_of_parts", PartsContract),
    Kernel("add_chains", _ON, f"{_MATMUL}.parts_in_turn:add_chains", PartsContract),
    Kernel("weight_gradient_of_parts", _ON, f"{_MATMUL}.parts:weight_gradient_of_parts", PartsChunkContract),
    Kernel("group_matmul", _ON, f"{_MATMUL}.groups:group_matmul", WgmmaContract()),
    Kernel("group_weight_gradient", _ON, f"{_MATMUL}.groups:group_weight_gradient", WgmmaChunkContract()),
    Kernel("quantized_product", _ON, f"{_MATMUL}.quantized:quantized_product", _quantized),
    Kernel("quantized_groups", _ON, f"{_MATMUL}.quantized:quantized_groups", _quantized),
    Kernel("row_program", _ON, f"{_OPS}.row_program.hopper:run_program", _ROWS),
    Kernel("rms_norm", _ON, f"{_OPS}.norm.hopper:rms_norm", _ROWS),
    Kernel("rms_norm_gradient", _ON, f"{_OPS}.norm.hopper:rms_norm_gradient", _ROWS),
    Kernel("rms_norm_gradients", _ON, f"{_OPS}.norm.hopper:rms_norm_gradients", _ROWS, serves=_reads_once),
    Kernel("layer_norm", _ON, f"{_OPS}.norm.hopper:layer_norm", _ROWS),
    Kernel("layer_norm_gradient", _ON, f"{_OPS}.norm.hopper:layer_norm_gradient", _ROWS),
    Kernel("norm_weight_gradient", _ON, f"{_OPS}.norm.hopper:weight_gradient", _CHUNKS),
    Kernel("softmax", _ON, f"{_OPS}.softmax.hopper:softmax", online_row_contract, PTX_FUNCTIONS),
    Kernel("softmax_gradient", _ON, f"{_OPS}.softmax.hopper:softmax_gradient", _ROWS),
    Kernel("log_softmax", _ON, f"{_OPS}.softmax.hopper:log_softmax", online_row_contract, PTX_FUNCTIONS),
    Kernel("log_softmax_gradient", _ON, f"{_OPS}.softmax.hopper:log_softmax_gradient", _ROWS, PTX_FUNCTIONS),
    Kernel("logsumexp", _ON, f"{_OPS}.softmax.hopper:logsumexp", online_row_contract, PTX_FUNCTIONS),
    Kernel("logsumexp_gradient", _ON, f"{_OPS}.softmax.hopper:logsumexp_gradient", None, PTX_FUNCTIONS),
    Kernel("cross_entropy", _ON, f"{_OPS}.cross_entropy.hopper:cross_entropy", online_row_contract, PTX_FUNCTIONS),
    Kernel("cross_entropy_gradient", _ON, f"{_OPS}.cross_entropy.hopper:cross_entropy_gradient", None, PTX_FUNCTIONS),
    Kernel(
        "cross_entropy_gradient_of_parts",
        _ON,
        f"{_OPS}.cross_entropy.hopper:cross_entropy_gradient_of_parts",
        PartsContract,
        PTX_FUNCTIONS,
    ),
    Kernel("sum_axis", _ON, f"{_OPS}.rows.hopper:sum_axis", _ROWS),
    Kernel("sum_rows", _ON, f"{_OPS}.rows.hopper:sum_rows", _CHUNKS),
    Kernel("variance", _ON, f"{_OPS}.rows.hopper:variance", _ROWS),
    Kernel("quantize", _ON, f"{_OPS}.quantize.hopper:quantize"),
    Kernel("quantize_swiglu", _ON, f"{_OPS}.quantize.hopper:quantize_swiglu", None, PTX_FUNCTIONS),
    Kernel("quantize_norm", _ON, f"{_OPS}.quantize.hopper:quantize_norm", _ROWS),
    Kernel(
        "attention",
        _ON,
        f"{_OPS}.attention.hopper:attention",
        _attention,
        serves=_reads_all,
    ),
    # Under the contract of the one in Triton, which serves other widths and dtypes.
    Kernel(
        "attention",
        _ON,
        f"{_OPS}.attention.hopper:latent_attention",
        _latents,
        serves=_reads_latents,
    ),
    Kernel(
        "attention_gradients",
        _ON,
        f"{_OPS}.attention.hopper:attention_gradients",
        _attention_gradients,
        serves=lambda call, *_, **__: _reads_all(call, arrays=frozenset(("alibi_slopes",))),
    ),
)
