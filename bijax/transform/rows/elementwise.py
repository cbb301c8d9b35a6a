"""Rules of operations on elements: equal shapes, apart from scalars and axes of length 1."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from bijax.transform.rows.flow import Flow, rule
from bijax.transform.rows.value import Value, chosen, combined, met_along
from bijax.transform.rules._elementwise import FENCED, VECTORS
from bijax.transform.rules._kept import EXACT, KEEP

ARITHMETIC: Final = frozenset({"add", "add_any", "sub", "max", "min", "neg", "abs", "select_n", *FENCED, *VECTORS})
"""Operations on elements that count as arithmetic."""

_OTHERS: Final = (
    "clamp convert_element_type rem regularized_incomplete_beta random_fold_in random_gamma random_clone threefry2x32"
    " threefry4x32 philox2x32 philox4x32 copy copy_p device_put empty2 layout_constraint name pin unpin reshard"
    " sharding_constraint stop_gradient tie with_memory_space_constraint xla_metadata_value pvary pbroadcast"
    " bijax_elementwise bijax_whole"
)
NAMES: Final = frozenset({*KEEP[EXACT].split(), *ARITHMETIC, *_OTHERS.split()} - {"bitcast_convert_type"})
"""All operations on elements."""


@rule(" ".join(sorted(NAMES)))
def elementwise(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of an operation on elements."""
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    return [of_elements(flow, eqn, values, shapes, v.aval.shape) for v in eqn.outvars]


def of_elements(
    flow: Flow, eqn: Any, values: list[Value], shapes: list[tuple[int, ...]], shape: tuple[int, ...]
) -> Value:
    """Returns the result of an operation on elements.

    Args:
        flow: The flow.
        eqn: The equation.
        values: Its operands.
        shapes: Their shapes.
        shape: Shape of the result.
    """
    name = eqn.primitive.name
    rows, differ = chosen([v.rows for v in values])
    spread = [_spread(v, s, shape) for v, s in zip(values, shapes, strict=True)]
    if rows is None:
        varies = frozenset().union(*(v.varies for v in spread))
        return _with_known(combined(values, None, varies=varies), name, eqn, values)
    here = flow.here(eqn, "position")
    mixing = {flow.here(eqn, "meet")} if differ else set()
    for value in spread:
        mixing |= met_along(value, rows, here)
    scales = [v for i, v in enumerate(spread) if v.rows is None and not v.varies and _scales(name, i)]
    if not scales:
        return combined(values, rows, mixing=mixing)
    rest = [v for v in spread if not any(v is s for s in scales)]
    result = combined(rest, rows, mixing=mixing)
    scaled = frozenset().union(*(v.sums | v.scaled for v in scales))
    return Value(rows, result.mixing.union(*(v.mixing for v in scales)), result.scaled | scaled)


def _scales(name: str, position: int) -> bool:
    return name == "mul" or (name == "div" and position == 1)


def _spread(value: Value, own: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    """Returns an operand with the axes of the result."""
    if own == shape or value.rows is not None:
        return value
    kept = {a for a in range(len(own)) if len(own) == len(shape) and own[a] == shape[a]}
    varies = frozenset((axis, place) for axis, place in value.varies if axis in kept or axis < 0)
    return Value(None, value.mixing, value.scaled, value.sums, varies)


_COMPUTED: Final[dict[str, Callable[..., Any]]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "gt": np.greater,
    "ge": np.greater_equal,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: np.select([which == i for i in range(len(cases))], cases),
}
"""What index arithmetic needs."""


def _with_known(result: Value, name: str, eqn: Any, values: list[Value]) -> Value:
    if any(v.known is None for v in values) or not values:
        return result
    known = [v.known for v in values]
    dtype = eqn.outvars[0].aval.dtype
    if name == "convert_element_type" and np.issubdtype(dtype, np.integer):
        computed: Any = known[0]
    elif name in _COMPUTED:
        computed = _COMPUTED[name](*known)
    else:
        return result
    array = np.broadcast_to(np.asarray(computed).astype(dtype), eqn.outvars[0].aval.shape)
    return Value(None, result.mixing, result.scaled, result.sums, result.varies, array)


@rule("optimization_barrier", partly=True)
def barrier(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the operands."""
    return values
