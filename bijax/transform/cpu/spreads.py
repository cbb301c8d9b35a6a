"""Magnitudes of values that are computed from constants alone, for `bijax.transform.cpu.constants`.

The *spread* of a value is a number S such that all its nonzero numbers are between 2 ** -S and 2 ** S.
"""

import math
from typing import Any, Final

from bijax.transform.rules._kept import MOVES
from bijax.transform.rules.registry import names_of

_FLUSHED: Final = {
    "bfloat16": 120,
    "complex128": 1000,
    "complex64": 120,
    "float32": 120,
    "float64": 1000,
}
"""Types whose subnormal numbers CPU instructions flush to zero, and their safe spread."""

OF_INTEGERS: Final = 64.0
"""Spread of integers, and of floating numbers of types that are not in `_FLUSHED`."""

MOVING: Final = frozenset({"select_n", *names_of(MOVES)})
"""Primitives whose results are numbers of their operands, or zeros."""

_MANTISSA: Final = 53
_UNCHANGED: Final = frozenset(["abs", "clamp", "copysign", "imag", "max", "min", "neg", "real", "sign"])
_COMPARISONS: Final = frozenset(["eq", "ge", "gt", "is_finite", "le", "lt", "ne"])
_FOLDED_OTHERWISE: Final = frozenset(["reduce_precision"])
"""Primitives that XLA computes in another way at compile time, for subnormal numbers of any floating type."""


def spread(eqn: Any, spreads: list[float]) -> float | None:
    """Returns the spread of the results of an equation, None if subnormal numbers are possible or nothing is known.

    Args:
        eqn: The equation.
        spreads: The spreads of its operands.
    """
    name, most = eqn.primitive.name, max(spreads, default=0.0)
    values = [x.aval for x in (*eqn.invars, *eqn.outvars) if limit(x.aval)]
    if name in _FOLDED_OTHERWISE:
        return None
    if not values or name in MOVING:
        return most if values else OF_INTEGERS
    if not floats(eqn):  # integers, or types that are computed in float32
        found = max(most, OF_INTEGERS) if name in ("convert_element_type", "iota") else math.inf
    elif name in _COMPARISONS:
        found = OF_INTEGERS
    elif name in _UNCHANGED or (
        name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    ):
        found = most
    else:
        found = {
            "add": most + _MANTISSA,
            "add_any": most + _MANTISSA,
            "ceil": most,
            "convert_element_type": most + 1,
            "div": sum(spreads) + 1,
            "floor": most,
            "integer_pow": abs(eqn.params.get("y", 1)) * (most + 1),
            "mul": sum(spreads) + 1,
            "round": most,
            "rsqrt": most,
            "sqrt": most,
            "square": 2 * most + 1,
            "sub": most + _MANTISSA,
        }.get(name, math.inf)
    largest = max(most, found)
    return found if all(largest <= (limit(aval) or 0) for aval in values) else None


def floats(eqn: Any) -> list[int]:
    """Returns the indices of the operands of an equation whose subnormal numbers are flushed to zero."""
    return [i for i, x in enumerate(eqn.invars) if limit(x.aval)]


def limit(aval: Any) -> int | None:
    """Returns the safe spread of a type, None if its subnormal numbers are not flushed to zero."""
    return _FLUSHED.get(str(getattr(aval, "dtype", "")))
