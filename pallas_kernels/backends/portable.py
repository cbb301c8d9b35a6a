"""Programs of XLA with fixed shapes, which run on CPUs and on any NVIDIA GPU."""

from typing import Final

from pallas_kernels.contract import XLA_FUNCTIONS, chunk_contract, row_contract
from pallas_kernels.registry import Kernel

_ON: Final = ("cpu", "cuda")
_OPS: Final = "pallas_kernels.ops"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()

KERNELS: Final = (
    Kernel("rms_norm", _ON, f"{_OPS}.norm.portable:rms_norm", _ROWS),
    Kernel("rms_norm_gradient", _ON, f"{_OPS}.norm.portable:rms_norm_gradient", _ROWS),
    Kernel("layer_norm", _ON, f"{_OPS}.norm.portable:layer_norm", _ROWS),
    Kernel("layer_norm_gradient", _ON, f"{_OPS}.norm.portable:layer_norm_gradient", _ROWS),
    Kernel("norm_weight_gradient", _ON, f"{_OPS}.norm.portable:weight_gradient", _CHUNKS),
    Kernel("softmax", _ON, f"{_OPS}.softmax.portable:softmax", _ROWS, XLA_FUNCTIONS),
    Kernel("softmax_gradient", _ON, f"{_OPS}.softmax.portable:softmax_gradient", _ROWS),
    Kernel("log_softmax", _ON, f"{_OPS}.softmax.portable:log_softmax", _ROWS, XLA_FUNCTIONS),
    Kernel("log_softmax_gradient", _ON, f"{_OPS}.softmax.portable:log_softmax_gradient", _ROWS, XLA_FUNCTIONS),
    Kernel("logsumexp", _ON, f"{_OPS}.softmax.portable:logsumexp", _ROWS, XLA_FUNCTIONS),
    Kernel("logsumexp_gradient", _ON, f"{_OPS}.softmax.portable:logsumexp_gradient", None, XLA_FUNCTIONS),
    Kernel("cross_entropy", _ON, f"{_OPS}.cross_entropy.portable:cross_entropy", _ROWS, XLA_FUNCTIONS),
    Kernel("cross_entropy_gradient", _ON, f"{_OPS}.cross_entropy.portable:cross_entropy_gradient", None, XLA_FUNCTIONS),
    Kernel("sum_axis", _ON, f"{_OPS}.rows.portable:sum_axis", _ROWS),
    Kernel("sum_rows", _ON, f"{_OPS}.rows.portable:sum_rows", _CHUNKS),
    Kernel("variance", _ON, f"{_OPS}.rows.portable:variance", _ROWS),
    Kernel("variance_gradient", _ON, f"{_OPS}.rows.portable:variance_gradient", None, XLA_FUNCTIONS),
    Kernel("quantize", _ON, f"{_OPS}.quantize.portable:quantize"),
    Kernel("quantize_swiglu", _ON, f"{_OPS}.quantize.portable:quantize_swiglu", None, XLA_FUNCTIONS),
    Kernel("quantize_norm", _ON, f"{_OPS}.quantize.portable:quantize_norm", _ROWS),
)
