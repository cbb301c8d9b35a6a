"""Updates of arrays from their own elements, which XLA:CPU may write while it still reads the array.

XLA:CPU of jaxlib 0.12 computes an update inside the loop that writes it into the array, and misses that the loop reads
the same memory through a transpose or a reshape. `x.at[1:].set(x[:-1])` under `vmap` over the last axis is then wrong
for a batch of one, where the transpose moves nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from jax.interpreters.mlir import ir

from bijax.transform.cpu import fences

IN_PLACE: Final = {
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), 2),
}
"""Primitives that write into the memory of their first operand, and the operand that they write."""

_VIEWS: Final = frozenset(
    f"stablehlo.{name}"
    for name in ("bitcast_convert", "broadcast_in_dim", "optimization_barrier", "reshape", "transpose")
) | {"func.call"}
"""Operations whose results may alias their operands. Calls are inlined."""

_MOST: Final = 256
"""Maximum number of operations to inspect. Beyond it, an update is assumed to read the array."""


def with_update_before(name: str, operands: Sequence[Any]) -> list[Any]:
    """Returns the operands of a primitive of `IN_PLACE`, with the update computed before the array is written.

    Args:
        name: Name of the primitive.
        operands: Its operands, in a program being lowered for a CPU.
    """
    values = list(operands)
    place = IN_PLACE[name]
    if _may_read(values[place], values[0]):
        values[place : place + 1] = fences.alone([values[place]])
    return values


def _may_read(update: Any, array: Any) -> bool:
    """Returns whether an update may be computed from values that alias an array."""
    memory = set(_made_of(array, _VIEWS))
    for count, value in enumerate(_made_of(update, None)):
        if count == _MOST or value in memory:
            return True
        if _is_any_array(value) and any(_is_any_array(other) for other in memory):
            return True
    return False


def _made_of(value: Any, names: frozenset[str] | None) -> Iterator[Any]:
    """Yields a value and those that it is computed from, by operations of these names or by any."""
    found, left = set(), [value]
    while left:
        value = left.pop(0)
        if value in found:
            continue
        found.add(value)
        yield value
        maker = value.owner
        if not isinstance(maker, ir.Block) and (names is None or maker.name in names):
            left += maker.operands


def _is_any_array(value: Any) -> bool:
    """Returns whether a value is a parameter of a function that is called with unknown arrays."""
    block = value.owner
    if not isinstance(block, ir.Block):
        return False
    function = block.owner
    return function.operation.name == "func.func" and ir.StringAttr(function.attributes["sym_name"]).value != "main"
