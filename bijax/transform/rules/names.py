"""The names of operations in the registry."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bijax.core.explicit_axes import is_partial

CUDNN_ATTENTION: Final = tuple(
    f"dot_product_attention_{way}{wrapper}" for way in ("fwd", "bwd") for wrapper in ("", "_wrapper")
)
"""The primitives of cuDNN's attention."""

PARTIAL: Final = "operations on unreduced types"
"""The name of every operation that has an operand, or is asked for a result, of such a type."""

_OFFSETS: Final = 6
"""Index of the offsets of packed sequences among the operands of cuDNN's attention."""


def rule_name(name: str, parameters: Mapping[str, Any], operands: Sequence[Any] = ()) -> str:
    """Returns the name of an operation in the registry.

    It is the name of its primitive, except for types that JAX calls unreduced, `scatter_apply`, callbacks without
    results, random numbers and keys whose count no batch changes, kernels of jax-triton with several configurations,
    and calls of cuDNN's attention that are not replaced.

    Args:
        name: Name of the primitive.
        parameters: Its parameters.
        operands: Abstract values of its operands.
    """
    if any(map(is_partial, (parameters.get("out_sharding"), *(getattr(a, "sharding", None) for a in operands)))):
        return PARTIAL
    if name == "scatter" and parameters.get("update_jaxpr") is not None:
        return "scatter_apply"
    if name == "io_callback" and not parameters.get("result_avals", (name,)):
        return "io_callback without results"
    if name == "triton_kernel_call" and len(getattr(parameters.get("fn"), "configs", ())) > 1:
        return "triton_kernel_call with autotuning"
    if name == "random_bits" and parameters.get("shape") == ():
        return "random_bits of one number"
    if name == "random_split" and parameters.get("shape") == (2,):
        return "random_split in two"
    variant = _cudnn_variant(parameters, operands) if name in CUDNN_ATTENTION else ""
    return f"{name} {variant}" if variant else name


def _cudnn_variant(parameters: Mapping[str, Any], operands: Sequence[Any]) -> str:
    """Returns why a call of cuDNN's attention is not replaced; empty if it is replaced."""
    if parameters.get("dropout_rate"):
        return "with dropout"
    if any(parameters.get(name) is not None for name in ("score_mod", "score_mod_jaxpr")):
        return "with a score_mod"
    if getattr(parameters.get("mask_type"), "name", "") == "ALIBI":
        return "with ALiBi"
    if len(operands) > _OFFSETS and len(operands[_OFFSETS].shape) == 2:
        return "of packed sequences"
    return ""
