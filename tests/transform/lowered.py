"""Reading lowered programs: which equations add floating-point numbers in an order that is left to the compiler."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.interpreters.mlir import ir

_REDUCING = (
    "stablehlo.all_reduce stablehlo.convolution stablehlo.dot stablehlo.dot_general stablehlo.reduce"
    " stablehlo.reduce_scatter stablehlo.reduce_window stablehlo.scatter stablehlo.select_and_scatter chlo.ragged_dot"
).split()
_SUMS = ("stablehlo.add", "stablehlo.multiply")


def unmarked_sums(program: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the names of the operations that combine floats and are not marked as the code of a kernel."""
    lower = getattr(program, "lower", None) or jax.jit(program).lower
    return unmarked_in(lower(*args))


def unmarked_in(lowered: jax.stages.Lowered) -> list[str]:
    """Returns the same for a program that is lowered already."""
    return [
        op.name for op in operations(lowered.compiler_ir("stablehlo").operation) if _sums_floats(op) and not _marked(op)
    ]


def operations(op: Any) -> Iterator[Any]:
    """Yields an operation and all that stand inside of it."""
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from operations(inner.operation)


def _sums_floats(op: Any) -> bool:
    if op.name not in _REDUCING:
        return False
    kinds = (str(ir.RankedTensorType(r.type).element_type) for r in op.results)
    if not any(kind.startswith(("f", "bf")) for kind in kinds):
        return False
    bodies = [inner.name for region in op.regions for block in region.blocks for inner in block.operations]
    return not bodies or any(name in _SUMS for name in bodies)


def _marked(op: Any) -> bool:
    if "mhlo.frontend_attributes" not in op.attributes:
        return False
    attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
    return "bijax" in attributes and ir.StringAttr(attributes["bijax"]).value == "kernel"
