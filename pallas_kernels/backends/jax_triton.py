"""Kernels in Triton, called through jax-triton, for NVIDIA GPUs from Ampere on that have no kernels of their own.

On Hopper products and row operations serve where a caller asks for them by name (`bijax.prefer_backend`): mma.sync and
wgmma give the same bits there, so products have the contracts of wgmma. Attention serves what Hopper's kernels do not.
"""

from collections.abc import Callable
from typing import Any, Final

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ChunkContract,
    ElementwiseContract,
    MatmulContract,
    MmaAttentionContract,
    MmaChunkContract,
    MmaContract,
    MmaTf32Contract,
    ProductSpec,
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

_OPS: Final = "pallas_kernels"
_MATMUL: Final = f"{_OPS}.matmul.jax_triton.launch"
_ATTENTION: Final = f"{_OPS}.attention.jax_triton"
_NORM: Final = f"{_OPS}.norm.jax_triton.launch"
_SOFTMAX: Final = f"{_OPS}.softmax.jax_triton.launch"
_SUMS: Final = f"{_OPS}.rows.jax_triton.launch"
_CROSS_ENTROPY: Final = f"{_OPS}.cross_entropy.jax_triton.launch"
_QUANTIZE: Final = f"{_OPS}.quantize.jax_triton.launch"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()
_PACKAGES: Final = Packages(("triton", "jax-triton", "jax-cuda13-plugin|jax-cuda12-plugin"), "cuda13")
_16_BITS: Final = ("bfloat16", "float16")


def _mma(product: ProductSpec) -> MmaContract | None:
    return MmaContract() if product.dtype in _16_BITS else None


def _wgmma(product: ProductSpec) -> WgmmaContract | None:
    return WgmmaContract() if product.dtype in _16_BITS else None


def _mma_tf32(product: ProductSpec) -> MmaTf32Contract | None:
    return MmaTf32Contract() if product.dtype == "float32" and product.in_tf32 else None


def _wgmma_tf32(product: ProductSpec) -> Tf32Contract | None:
    return Tf32Contract() if product.dtype == "float32" and product.in_tf32 else None


def _chains(product: ProductSpec) -> MatmulContract | None:
    exact = product.dtype == "float64" or (product.dtype == "float32" and not product.in_tf32)
    return chain_contract(product) if exact else None


def _mma_chunks(product: ProductSpec) -> MmaChunkContract | None:
    return MmaChunkContract() if product.dtype in _16_BITS else None


def _wgmma_chunks(product: ProductSpec) -> WgmmaChunkContract | None:
    return WgmmaChunkContract() if product.dtype in _16_BITS else None


def _chunks(product: ProductSpec) -> ChunkContract | None:
    return chunk_contract() if product.dtype == "float32" else None


def _unsplit(choose: Callable[[ProductSpec], Any]) -> Callable[[ProductSpec], Any]:
    """Returns the choice of a contract for products that are not split along K."""
    return lambda product: choose(product) if product.splits == 1 else None


def _of_activation(product: ProductSpec) -> ElementwiseContract | None:
    return PTX_FUNCTIONS if product.activation in ("gelu", "silu") else None


def _attention_kernel(operation: str, function: str) -> Kernel:
    """Returns a kernel of attention, for what Hopper's do not serve too."""
    load = f"{_ATTENTION}:{function}"
    return Kernel(operation, "mma", load, _attention, packages=_PACKAGES, takes_target=True)


def _attention(widths: tuple[int, str, int]) -> MmaAttentionContract:
    size, dtype, value_size = widths
    return mma_attention_contract(dtype, max(size, value_size), version=2)


def _kernels(
    on: str | tuple[str, ...],
    product: Callable[..., Any],
    tf32: Callable[..., Any],
    chunks: Callable[..., Any],
    *,
    by_name: bool = False,
) -> tuple[Kernel, ...]:
    """Returns the kernels for some GPUs, with the contracts of products on their tensor cores."""

    def kernel(operation: str, load: str, contract: Any = None, functions: Any = None) -> Kernel:
        options: dict[str, Any] = {"packages": _PACKAGES, "takes_target": True, "by_name": by_name}
        return Kernel(operation, on, load, contract, functions, **options)

    return (
        kernel("matmul", f"{_MATMUL}:matmul", product),
        kernel("matmul", f"{_MATMUL}:matmul", tf32),
        kernel("matmul", f"{_MATMUL}:matmul", _chains),
        kernel("fused_matmul", f"{_MATMUL}:matmul", _unsplit(product), _of_activation),
        kernel("gated_matmul", f"{_MATMUL}:gated_matmul", _unsplit(product), _of_activation),
        kernel("weight_gradient", f"{_MATMUL}:weight_gradient", chunks),
        kernel("weight_gradient", f"{_MATMUL}:weight_gradient", _chunks),
        kernel("rms_norm", f"{_NORM}:rms_norm", _ROWS),
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


KERNELS: Final = (
    *_kernels(_OTHERS, _mma, _mma_tf32, _mma_chunks),
    *_kernels(_HOPPER, _wgmma, _wgmma_tf32, _wgmma_chunks, by_name=True),
    _attention_kernel("attention", "attention"),
    _attention_kernel("attention_gradients", "gradients"),
    _attention_kernel("attention_score_gradients", "score_gradients"),
)
