"""Magnitudes of values that are computed from constants alone, for `bijax.transform.cpu.constants`.

The *spread* of a value is a number S such that all its nonzero numbers are between 2 ** -S and 2 ** S.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

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

NONE, SOME, ALL = range(3)
"""How many numbers of a value may be zero."""

_MANTISSA: Final = 53
_UNCHANGED: Final = frozenset(["abs", "clamp", "copysign", "imag", "max", "min", "neg", "real", "sign"])
_COMPARISONS: Final = frozenset(["eq", "ge", "gt", "is_finite", "le", "lt", "ne"])
_ZERO_BY_OPERANDS: Final = frozenset({"abs", "div", "mul", "neg", "square", *MOVING} - {"iota"})
"""Primitives whose results are zero only if an operand is."""

_PARTS: Final = MOVING - {"broadcast_in_dim", "copy", "copy_p", "reshape", "rev", "squeeze", "transpose"}
"""Those whose results may lack numbers of their operands."""

_FOLDED_OTHERWISE: Final = frozenset(["reduce_precision"])
"""Primitives that XLA computes in another way at compile time, for subnormal numbers of any floating type."""


SUMS: Final = frozenset(["add", "add_any", "sub"])
_ADDS_CONSTANTS_FIRST: Final = jax.__version_info__ < (0, 12)
"""Whether XLA adds the constants of two sums first."""


class Constant(NamedTuple):
    """A value computed only from constants.

    Attributes:
        spread: All its nonzero numbers are between 2 ** -spread and 2 ** spread.
        arguments: Arguments and constant arrays of the program that it is computed from.
        zeros: Whether none, some or all of its numbers may be zero.
    """

    spread: float
    arguments: frozenset[Any] = frozenset()
    zeros: int = ALL


Known = Constant | None


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


def zeros(eqn: Any, of_operands: list[int]) -> int:
    """Returns whether none, some or all numbers in the results of an equation may be zero.

    Args:
        eqn: The equation, with a spread.
        of_operands: The same of its operands.
    """
    found = sorted(of_operands)
    if not found or eqn.primitive.name not in _ZERO_BY_OPERANDS:
        return ALL
    several = eqn.primitive.name in _PARTS or found[:-1].count(NONE) < len(found) - 1
    return ALL if found[-1] == SOME and several else found[-1]


def added(eqn: Any, operands: Sequence[Known]) -> list[int]:
    """Returns the constants among the operands of a sum that XLA must not see.

    Args:
        eqn: The equation, of a primitive in `SUMS`.
        operands: What is known of its operands.
    """
    x, y = operands
    if eqn.primitive.name == "sub":
        places = []
    else:
        places = [
            i for i, (a, b) in enumerate(((x, y), (y, x))) if a and a.zeros == ALL and (b is None or b.zeros != NONE)
        ]
    if _ADDS_CONSTANTS_FIRST and None in (x, y):
        places += [i for i in floats(eqn) if not isinstance(eqn.invars[i], Literal)]
    return [i for i in places if operands[i] and jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.inexact)]


def floats(eqn: Any) -> list[int]:
    """Returns the indices of the operands of an equation whose subnormal numbers are flushed to zero."""
    return [i for i, x in enumerate(eqn.invars) if limit(x.aval)]


def limit(aval: Any) -> int | None:
    """Returns the safe spread of a type, None if its subnormal numbers are not flushed to zero."""
    return _FLUSHED.get(str(getattr(aval, "dtype", "")))


def of_literal(literal: Any) -> Constant:
    """Returns what is known of a literal."""
    numbers = np.asarray(literal.val)
    found = spread_of(numbers) if limit(literal.aval) else OF_INTEGERS
    return Constant(found, zeros=NONE if numbers.all() else SOME if numbers.any() else ALL)


def spread_of(numbers: np.ndarray) -> float:
    """Returns the spread of numbers."""
    if np.iscomplexobj(numbers):
        numbers = np.stack([numbers.real, numbers.imag])
    sizes = np.abs(numbers.astype(np.float64))
    sizes = sizes[(sizes > 0) & (sizes < np.inf)]
    return float(np.abs(np.log2([sizes.min(), sizes.max()])).max()) if sizes.size else 0.0
