"""Code of a program, before XLA rewrote it, that was not part of bijax kernels.

XLA drops the tag of an instruction that it recreates, but it adds no products and no sums. So if everything of a class
was tagged before, everything of that class is kernel code afterwards.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

from bijax.core.tag import KERNEL, TAG
from bijax.hlo._libraries import BENIGN
from bijax.hlo._opcodes import APPROXIMATED, COLLECTIVES, EXACT, ORDER_FREE, REDUCING, TRANSCENDENTAL

Class = Literal["reduction", "approximation", "product", "rounding"]
"""Why an instruction is variant: its sums, its approximation, a product contracted with a sum, or a rounding to 16 bits
next to a conversion back."""

_ATTRIBUTES: Final = "mhlo.frontend_attributes"
# fmt: off
_EXACT_HERE: Final = EXACT | frozenset((
    "return", "constant", "bitcast_convert", "broadcast_in_dim", "dynamic_slice", "dynamic_update_slice",
    "optimization_barrier", "is_finite", "all_gather", "all_to_all", "collective_permute", "get_tuple_element",
    "after_all", "clamp", "round_nearest_even", "case", "if", "custom_call", "reduce_precision", "get_dimension_size",
    "top_k",
))
# fmt: on
_WITH_COMBINER: Final = ("reduce", "reduce_window", "all_reduce", "reduce_scatter", "scatter")
_SUMS: Final = frozenset(name.replace("-", "_") for name in (REDUCING | COLLECTIVES) - {"sort"}) | {"dot_general"}
_ROUNDING: Final = frozenset(name.replace("-", "_") for name in TRANSCENDENTAL) | {
    "add",
    "convert",
    "divide",
    "multiply",
    "sqrt",
    "subtract",
}
_APPROXIMATIONS: Final = frozenset(name.replace("-", "_") for name in TRANSCENDENTAL) | APPROXIMATED


def untagged_classes(module: Any) -> frozenset[Class]:
    """Returns the classes with an untagged operation.

    Args:
        module: A StableHLO module, as from `jax.stages.Lowered.compiler_ir("stablehlo")`.
    """
    found: set[Class] = set()
    for operation in _operations(module.operation):
        if not _is_tagged(operation) and _has_floats(operation):
            found |= _classes(operation)
            if _is_open_rounding(operation):
                found.add("rounding")
    return frozenset(found)


def _classes(operation: Any) -> set[Class]:
    dialect, _, name = operation.name.partition(".")
    if dialect not in ("stablehlo", "chlo"):
        return set()
    if name == "custom_call":
        target = str(operation.attributes["call_target_name"]).strip('"')
        return set() if BENIGN.search(target) else {"reduction", "approximation", "product"}
    if name in _SUMS:
        combines = _adds(operation) if name in _WITH_COMBINER else True
        return {"reduction"} if combines and not (name == "reduce" and _has_single_terms(operation)) else set()
    if _is_scalar(operation):  # no loop, no remainder; also the combiners of sums
        return set()
    if name == "square":
        return {"product"}
    if name in _APPROXIMATIONS or dialect == "chlo":
        return {"approximation", "product"}
    return set() if name in _EXACT_HERE else {"product"}


def _is_open_rounding(operation: Any) -> bool:
    """Returns whether an operation rounds to 16 bits and the result is used unfenced."""
    if _name(operation) not in _ROUNDING or _is_scalar(operation):
        return False
    (result,) = operation.results
    narrow = _element(result.type)[:-1] in ("f16", "bf16")
    exact = _name(operation) == "convert" and _element(operation.operands[0].type)[:-1] in ("f16", "bf16")
    return narrow and not exact and any(_name(use.owner.operation) in _ROUNDING for use in result.uses)


def _name(operation: Any) -> str:
    return str(operation.name).partition(".")[2]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _is_tagged(operation: Any) -> bool:
    if _ATTRIBUTES not in operation.attributes:
        return False
    attributes = operation.attributes[_ATTRIBUTES]
    return TAG in attributes and str(attributes[TAG]).strip('"') == KERNEL


def _has_floats(operation: Any) -> bool:
    return any(_element(result.type).startswith(("f", "bf", "complex")) for result in operation.results)


def _is_scalar(operation: Any) -> bool:
    return all("x" not in str(result.type).partition("complex")[0] for result in operation.results)


def _element(type_: Any) -> str:
    """Returns "f32" of "tensor<8x16xf32>"."""
    text = str(type_)
    return text.removeprefix("tensor<").lstrip("0123456789x?") if text.startswith("tensor<") else ""


def _has_single_terms(operation: Any) -> bool:
    """Returns whether a reduction only removes dimensions of size one."""
    before, after = (
        [n for n in str(v.type).removeprefix("tensor<").split("x")[:-1] if n != "1"]
        for v in (operation.operands[0], operation.results[0])
    )
    return before == after


def _adds(operation: Any) -> bool:
    """Returns whether a combiner depends on the order; one that takes the last element does not."""
    combiner = {o.name.partition(".")[2] for o in _operations(operation)} - {"return"}
    return bool(combiner - ORDER_FREE)
