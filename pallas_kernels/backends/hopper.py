"""Mosaic kernels for Hopper GPUs."""

from typing import Any, Final

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    attention_gradient_contract,
    chunk_contract,
    online_row_contract,
    row_contract,
    split_attention_contract,
)
from pallas_kernels.registry import Kernel
from pallas_kernels.schedule.hopper.attention import takes_scores

_ON: Final = "sm_90"
_OPS: Final = "pallas_kernels.ops"
_ROWS: Final = row_contract()
_CHUNKS: Final = chunk_contract()


def _takes_scores(call: Any, **_: Any) -> bool:
    return takes_scores(call.options.scale, call.options.soft_cap)


KERNELS: Final = (
    Kernel("rms_norm", _ON, f"{_OPS}.norm.hopper:rms_norm", _ROWS),
    Kernel("rms_norm_gradient", _ON, f"{_OPS}.norm.hopper:rms_norm_gradient", _ROWS),
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
        lambda widths: split_attention_contract(*widths),
        serves=_takes_scores,
    ),
    Kernel(
        "attention_gradients",
        _ON,
        f"{_OPS}.attention.hopper:attention_gradients",
        lambda widths: attention_gradient_contract(*widths),
        serves=lambda call, *_, **__: set(call.present) <= {"alibi_slopes"} and _takes_scores(call),
    ),
)
