"""Kernels in Triton, called through jax-triton, for NVIDIA GPUs from Ampere on that have no kernels of their own.

On Hopper products and row operations serve where a caller asks for them by name (`bijax.prefer_backend`), and some for
few rows (`pallas_kernels.parts.jax_triton.few_rows`): mma.sync and wgmma give the same bits there, so products have
the contracts of wgmma. Products in float64, routing, rotary embedding
with cache writes, drawing, the gated delta rule, and attention that Hopper's kernels do not serve run there by default.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

from pallas_kernels.contract import (
    GUMBEL,
    PTX_FUNCTIONS,
    XLA_FUNCTIONS,
    ChunkContract,
    ElementwiseContract,
    Float8Contract,
    MatmulContract,
    MmaAttentionContract,
    MmaChunkContract,
    MmaContract,
    MmaDeltaRuleContract,
    MmaDeltaRuleGradientContract,
    MmaTf32Contract,
    OnlineRowContract,
    ProductSpec,
    QuantContract,
    RowContract,
    SplitMmaContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
    chain_contract,
    chunk_contract,
    mma_attention_contract,
    row_contract,
)
from pallas_kernels.packages import Packages
from pallas_kernels.registry import Kernel

_HOPPER: Final = "sm_90"
_OTHERS: Final = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_120", "sm_121")
"""The GPUs with mma.sync on bfloat16 and without kernels of their own."""
_WITH_FLOAT8: Final = ("sm_89", "sm_120", "sm_121")
"""Those with mma.sync on float8: for sm_100, Triton multiplies it as float16 in tiles of few rows."""

_A_PRODUCT: Final = ProductSpec(("bfloat16", "bfloat16"), "float32")

_OPS: Final = "pallas_kernels"
_MATMUL: Final = f"{_OPS}.matmul.jax_triton"
_EXPERTS: Final = "expert_rows.jax_triton.launch"
_NORM: Final = f"{_OPS}.norm.jax_triton.launch"
_SOFTMAX: Final = f"{_OPS}.softmax.jax_triton.launch"
_SUMS: Final = f"{_OPS}.rows.jax_triton.launch"
_CROSS_ENTROPY: Final = f"{_OPS}.cross_entropy.jax_triton.launch"
_QUANTIZE: Final = f"{_OPS}.quantize.jax_triton.launch"
_FEW_ROWS: Final = f"{_OPS}.parts.jax_triton.few_rows"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()
_PACKAGES: Final = Packages(("triton", "jax-triton", "jax-cuda13-plugin|jax-cuda12-plugin"), "cuda13")
_16_BITS: Final = ("bfloat16", "float16")
_MOST_SPLITS: Final = 4
_ATTENTION_ARRAYS: Final = frozenset(
    ("page_table", "alibi_slopes", "sinks", "key_scale", "value_scale", "common_prefix", "bias", "mask")
)
"""The optional arrays that the kernels of attention read. Calls with others are left to the portable programs."""
_LEAST_KEPT: Final = 1 << 20
"""Elements of sequences of which some may be invalid: for fewer, XLA's programs take no longer."""
_CONV: Final = "causal_conv.jax_triton.launch"
_DELTA_RULE: Final = "delta_rule.extend"
_DELTA_WIDTHS: Final = (64, 128)


def _mma(product: ProductSpec) -> MmaContract | None:
    return MmaContract() if product.dtype in _16_BITS else None


def _wgmma(product: ProductSpec) -> WgmmaContract | None:
    return WgmmaContract() if product.dtype in _16_BITS else None


def _mma_tf32(product: ProductSpec) -> MmaTf32Contract | None:
    return MmaTf32Contract() if product.dtype == "float32" and product.in_tf32 else None


def _wgmma_tf32(product: ProductSpec) -> Tf32Contract | None:
    return Tf32Contract() if product.dtype == "float32" and product.in_tf32 else None


def _chains(product: ProductSpec) -> MatmulContract | None:
    return chain_contract(product) if product.dtype == "float32" and not product.in_tf32 else None


def _wide_chains(product: ProductSpec) -> MatmulContract | None:
    return chain_contract(product) if product.dtype == "float64" else None


def _mma_chunks(product: ProductSpec) -> MmaChunkContract | None:
    return MmaChunkContract() if product.dtype in _16_BITS else None


def _wgmma_chunks(product: ProductSpec) -> WgmmaChunkContract | None:
    return WgmmaChunkContract() if product.dtype in _16_BITS else None


def _chunks(product: ProductSpec) -> ChunkContract | None:
    return chunk_contract() if product.dtype == "float32" else None


def _split_mma(product: ProductSpec) -> SplitMmaContract | None:
    served = product.dtype in _16_BITS and 1 < product.splits <= _MOST_SPLITS
    return SplitMmaContract(product.splits) if served else None


def _split_wgmma(product: ProductSpec) -> SplitWgmmaContract | None:
    served = product.dtype in _16_BITS and 1 < product.splits <= _MOST_SPLITS
    return SplitWgmmaContract(product.splits) if served else None


def _unsplit(choose: Callable[[ProductSpec], Any]) -> Callable[[ProductSpec], Any]:
    """Returns the choice of a contract for products that are not split along K."""
    return lambda product: choose(product) if product.splits == 1 else None


def _either(whole: Callable[[ProductSpec], Any], split: Callable[[ProductSpec], Any]) -> Callable[[ProductSpec], Any]:
    """Returns the choice of a contract for products of a whole K, and for split ones."""
    return lambda product: whole(product) if product.splits == 1 else split(product)


def _int8(dtype: str) -> QuantContract | None:
    return QuantContract() if dtype == "int8" else None


def _float8(sums: Literal["mma32", "wgmma32"]) -> Callable[[str], Float8Contract | None]:
    return lambda dtype: Float8Contract(sums) if dtype == "float8_e4m3fn" else None


def _of_activation(product: ProductSpec) -> ElementwiseContract | None:
    return PTX_FUNCTIONS if product.activation in ("gelu", "silu") else None


def _on_all(operation: str, load: str, contract: Any = None, functions: Any = None, **options: Any) -> Kernel:
    """Returns a kernel for all GPUs from Ampere on, Hopper included."""
    options = {"packages": _PACKAGES, "takes_target": True, **options}
    return Kernel(operation, "mma", f"{_OPS}.{load}", contract, functions, **options)


def _attention(widths: tuple[int, str, int]) -> MmaAttentionContract:
    size, dtype, value_size = widths
    return mma_attention_contract(dtype, max(size, value_size))


def _reads_all(call: Any, *_: Any, **__: Any) -> bool:
    return _ATTENTION_ARRAYS.issuperset(call.present)


def _routing(contracts: Any) -> OnlineRowContract | RowContract | None:
    """Returns the order of softmax, for kernels with one of ours whose exponentials are PTX."""
    given = dict(contracts.softmax)
    served = isinstance(given["contract"], OnlineRowContract | RowContract) and given.get("functions") == PTX_FUNCTIONS
    return given["contract"] if served and contracts.sums == _ROWS else None


def _of_heads(norm: RowContract | None) -> RowContract | None:
    """Returns the order of the norm of heads, for kernels that compute it after the convolution."""
    return norm if norm == _ROWS else None


def _delta_rule(sizes: tuple[str, int, int]) -> MmaDeltaRuleContract | None:
    dtype, *widths = sizes
    served = dtype in _16_BITS and all(width in _DELTA_WIDTHS for width in widths)
    return MmaDeltaRuleContract() if served else None


def _delta_gradients(sizes: tuple[str, int, int]) -> MmaDeltaRuleGradientContract | None:
    return None if _delta_rule(sizes) is None else MmaDeltaRuleGradientContract()


def _kernels(
    on: str | tuple[str, ...],
    product: Callable[..., Any],
    split: Callable[..., Any],
    tf32: Callable[..., Any],
    chunks: Callable[..., Any],
    *,
    by_name: bool = False,
) -> tuple[Kernel, ...]:
    """Returns the kernels for some GPUs, with the contracts of products on their tensor cores."""

    def kernel(operation: str, load: str, contract: Any = None, functions: Any = None, for_few: str = "") -> Kernel:
        instead = f"{_FEW_ROWS}:{for_few}" if for_few and by_name else None
        options: dict[str, Any] = {"packages": _PACKAGES, "takes_target": True, "by_name": by_name, "instead": instead}
        return Kernel(operation, on, load, contract, functions, **options)

    return (
        kernel("matmul", f"{_MATMUL}.launch:matmul", product, for_few="products"),
        kernel("matmul", f"{_MATMUL}.launch:matmul", tf32),
        kernel("matmul", f"{_MATMUL}.launch:matmul", _chains),
        kernel("split_matmul", f"{_MATMUL}.launch:matmul", split, for_few="products"),
        kernel("fused_matmul", f"{_MATMUL}.launch:matmul", _either(product, split), _of_activation, "products"),
        kernel("gated_matmul", f"{_MATMUL}.launch:gated_matmul", _unsplit(product), _of_activation, "products"),
        kernel("weight_gradient", f"{_MATMUL}.launch:weight_gradient", chunks),
        kernel("weight_gradient", f"{_MATMUL}.launch:weight_gradient", _chunks),
        kernel("group_matmul", f"{_MATMUL}.groups:group_matmul", product(_A_PRODUCT), for_few="groups"),
        kernel("group_weight_gradient", f"{_MATMUL}.groups:group_weight_gradient", chunks(_A_PRODUCT)),
        kernel("quantized_product", f"{_MATMUL}.quantized:quantized_product", _int8),
        kernel("quantized_groups", f"{_MATMUL}.quantized:quantized_groups", _int8),
        kernel("rms_norm", f"{_NORM}:rms_norm", _ROWS, for_few="norm"),
        kernel("rms_norm_gradient", f"{_NORM}:rms_norm_gradient", _ROWS),
        kernel("layer_norm", f"{_NORM}:layer_norm", _ROWS),
        kernel("layer_norm_gradient", f"{_NORM}:layer_norm_gradient", _ROWS),
        kernel("norm_weight_gradient", f"{_NORM}:weight_gradient", _CHUNKS),
        kernel("sum_axis", f"{_SUMS}:sum_axis", _ROWS),
        kernel("sum_rows", f"{_SUMS}:sum_rows", _CHUNKS),
        kernel("variance", f"{_SUMS}:variance", _ROWS),
        kernel("softmax", f"{_SOFTMAX}:softmax", _ROWS, PTX_FUNCTIONS),
        kernel("softmax_gradient", f"{_SOFTMAX}:softmax_gradient", _ROWS),
        kernel("log_softmax", f"{_SOFTMAX}:log_softmax", _ROWS, PTX_FUNCTIONS),
        kernel("log_softmax_gradient", f"{_SOFTMAX}:log_softmax_gradient", _ROWS, PTX_FUNCTIONS),
        kernel("logsumexp", f"{_SOFTMAX}:logsumexp", _ROWS, PTX_FUNCTIONS),
        kernel("logsumexp_gradient", f"{_SOFTMAX}:logsumexp_gradient", None, PTX_FUNCTIONS),
        kernel("cross_entropy", f"{_CROSS_ENTROPY}:cross_entropy", _ROWS, PTX_FUNCTIONS),
        kernel("cross_entropy_gradient", f"{_CROSS_ENTROPY}:cross_entropy_gradient", None, PTX_FUNCTIONS),
        kernel("quantize", f"{_QUANTIZE}:quantize"),
        kernel("quantize_swiglu", f"{_QUANTIZE}:quantize_swiglu", None, PTX_FUNCTIONS),
        kernel("quantize_norm", f"{_QUANTIZE}:quantize_norm", _ROWS),
    )


def _float8_kernels(
    on: str | tuple[str, ...], sums: Literal["mma32", "wgmma32"], *, by_name: bool = False
) -> tuple[Kernel, ...]:
    """Returns the kernels of float8 products; GPUs without such tensor cores multiply in bfloat16 instead."""
    options: dict[str, Any] = {"packages": _PACKAGES, "takes_target": True, "by_name": by_name}
    return tuple(
        Kernel(operation, on, f"{_MATMUL}.quantized:{operation}", _float8(sums), **options)
        for operation in ("quantized_product", "quantized_groups")
    )


KERNELS: Final = (
    *_kernels(_OTHERS, _mma, _split_mma, _mma_tf32, _mma_chunks),
    *_kernels(_HOPPER, _wgmma, _split_wgmma, _wgmma_tf32, _wgmma_chunks, by_name=True),
    *_float8_kernels(_WITH_FLOAT8, "mma32"),
    *_float8_kernels(_HOPPER, "wgmma32", by_name=True),
    _on_all("matmul", "matmul.jax_triton.launch:matmul", _wide_chains),
    _on_all("attention", "attention.jax_triton:attention", _attention, serves=_reads_all),
    _on_all("attention_gradients", "attention.jax_triton:gradients", _attention, serves=_reads_all),
    _on_all("attention_score_gradients", "attention.jax_triton:score_gradients", _attention, serves=_reads_all),
    # Both forms or none: a sequence is continued under the contract under which it was begun.
    _on_all("gated_delta_rule", "delta_rule.whole:gated_delta_rule", _delta_rule),
    _on_all("gated_delta_rule_extend", f"{_DELTA_RULE}:gated_delta_rule_extend", _delta_rule),
    _on_all(
        "gated_delta_rule_gradients", "delta_rule.jax_triton.gradients:gated_delta_rule_gradients", _delta_gradients
    ),
    _on_all(
        "nan_if_invalid",
        "delta_rule.jax_triton.invalid:nan_if_invalid",
        serves=lambda y, *_, **__: y.size >= _LEAST_KEPT,
    ),
    _on_all("select_experts", "routing.jax_triton.launch:select_experts", _routing, PTX_FUNCTIONS),
    _on_all("largest", "topk.jax_triton.launch:largest"),
    _on_all("sort_by_expert", f"{_EXPERTS}:sort_by_expert"),
    _on_all("spread_to_experts", f"{_EXPERTS}:spread_to_experts"),
    _on_all("rows_by_count", f"{_EXPERTS}:rows_by_count"),
    _on_all("rows_of_tokens", f"{_EXPERTS}:rows_of_tokens"),
    _on_all("add_expert_rows", f"{_EXPERTS}:add_expert_rows", None, XLA_FUNCTIONS),
    _on_all("pick_rows", "pick.jax_triton.launch:pick_rows"),
    _on_all("rotate_and_store", "rotary.jax_triton.launch:rotate_and_store", None, XLA_FUNCTIONS),
    _on_all("causal_conv", f"{_CONV}:causal_conv", None, XLA_FUNCTIONS),
    _on_all("causal_conv", f"{_CONV}:causal_conv", _of_heads, XLA_FUNCTIONS),
    _on_all("causal_conv_extend", f"{_CONV}:causal_conv_extend", None, XLA_FUNCTIONS),
    _on_all("causal_conv_extend", f"{_CONV}:causal_conv_extend", _of_heads, XLA_FUNCTIONS),
    _on_all("gated_rms_norm", "gated_norm.jax_triton.launch:gated_rms_norm", _of_heads, XLA_FUNCTIONS),
    _on_all("draw", "sampling.jax_triton.launch:draw", GUMBEL),
)
