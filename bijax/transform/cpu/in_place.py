"""Updates of arrays from their own elements, which XLA:CPU may write while it still reads the array.

XLA:CPU of jaxlib 0.11 and 0.12 computes an update inside the loop that writes it into the array, and misses that the
loop reads the same memory through a transpose or a reshape. `x.at[1:].set(x[:-1])` under `vmap` over the last axis is
then wrong for a batch of one, where the transpose moves nothing. So is an update that computes the elements of the
array once more, `jnp.sin(x).at[1:].set(jnp.sin(x)[:-1])`, since XLA computes equal values once, and an array that is
moved by an operation that moves nothing in a batch of one.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from jax.interpreters.mlir import ir

from bijax.transform.cpu import fences

IN_PLACE: Final = {
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), 2),
}
"""Primitives that write into the memory of their first operand, and the operand that they write."""

_REDUCERS: Final = frozenset(
    f"stablehlo.{name}" for name in ("reduce", "reduce_window", "scatter", "select_and_scatter", "sort")
)
"""Operations whose regions combine numbers and make no arrays."""

_MOST: Final = 256
"""Maximum number of values to inspect. Beyond it, an update is assumed to read the array."""


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
    """Returns whether the two may be computed from the same values, or from values that XLA finds equal."""
    memory = list(islice(_made_of(array), _MOST))
    read = list(islice(_made_of(update), _MOST))
    if _MOST in (len(memory), len(read)) or any(map(_is_any_array, memory + read)):
        return True
    return not {_key(value) for value in memory}.isdisjoint(map(_key, read))


def _key(value: Any) -> Any:
    """Returns what equal values have in common: the operation and the type, or the value if it is a parameter."""
    maker = value.owner
    return value if isinstance(maker, ir.Block) else (maker.name, str(value.type))


def _made_of(value: Any) -> Iterator[Any]:
    """Yields a value and those that it is computed from, except for single numbers."""
    found, left = set(), [value]
    while left:
        value = left.pop(0)
        if value in found or not getattr(value.type, "shape", None):  # tokens have no shape
            continue
        found.add(value)
        yield value
        maker = value.owner
        if not isinstance(maker, ir.Block):
            left += maker.operands


def _is_any_array(value: Any) -> bool:
    """Returns whether a value may equal any other: it enters or leaves a region or a function, which XLA inlines."""
    maker = value.owner
    if not isinstance(maker, ir.Block):
        return maker.name == "func.call" or (bool(len(maker.regions)) and maker.name not in _REDUCERS)
    function = maker.owner
    return function.operation.name != "func.func" or ir.StringAttr(function.attributes["sym_name"]).value != "main"
