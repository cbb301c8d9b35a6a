"""The kinds of values in a row program's region: rows of columns, or a number per row, and their dimensions."""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from jax.extend.core import Var

Equation = Any
Labels = tuple[int, ...]

FLOATS: Final = ("float32", "bfloat16")
"""Dtypes that a region computes."""

TESTS: Final = frozenset({"is_finite", "ge"})
"""Operations that map numbers to truth values."""


def is_variable(atom: Any) -> bool:
    """Returns whether an operand of an equation is a variable, not a constant."""
    return isinstance(atom, Var)


class Kind(NamedTuple):
    """The kind of a value in a region.

    Attributes:
        wide: Whether it has columns; otherwise it is one number per row, with or without a last dimension of 1.
        labels: The dimensions of the rows in the value's own order.
        shared: Whether all rows have the same columns; it has no labels then.
    """

    wide: bool
    labels: Labels
    shared: bool = False


VECTOR: Final = Kind(True, (), True)


@dataclass
class Region:
    """Equations that one kernel computes.

    Attributes:
        sizes: Lengths of the row dimensions, by label.
        columns: Length of a row.
        kinds: The kinds of the values, including those from outside.
        equations: Their indices in the program.
    """

    sizes: tuple[int, ...]
    columns: int
    kinds: dict[Any, Kind]
    equations: set[int] = field(default_factory=set)


def types_fit(name: str, eqn: Equation) -> bool:
    """Returns whether a region may compute an element-wise equation with these dtypes."""
    out, dtypes = eqn.outvars[0].aval.dtype, [v.aval.dtype for v in eqn.invars]
    if name == "convert_element_type":
        return dtypes[0].name in FLOATS and {dtypes[0].name, out.name} == {*FLOATS}
    if name in TESTS:
        return out == np.bool_ and dtypes[0].name in FLOATS and len({*dtypes}) == 1
    if name == "select_n" and (len(dtypes) != 3 or dtypes.pop(0) != np.bool_):
        return False
    return out.name in FLOATS and all(d == out for d in dtypes)


def transposed(region: Region, eqn: Equation) -> dict[Any, Kind] | None:
    """Returns the kinds of the values of a transposition of rows; None if columns move."""
    (operand,), (out,), order = eqn.invars, eqn.outvars, tuple(eqn.params["permutation"])
    if not is_variable(operand) or order[-1] != len(order) - 1 or len(order) != len(region.sizes) + 1:
        return None
    if operand in region.kinds:
        before = region.kinds[operand].labels
        after = tuple(before[d] for d in order[:-1])
    else:
        after = region.kinds[out].labels
        before = tuple(after[order.index(d)] for d in range(len(after)))
    if operand.aval.shape != (*(region.sizes[label] for label in before), region.columns):
        return None
    return {operand: Kind(True, before), out: Kind(True, after)}


def arranged(region: Region, eqn: Equation, known: Kind) -> dict[Any, Kind] | None:
    """Returns the kinds of numbers that gain or lose dimensions of 1, or are repeated as columns; None for others."""
    (operand, *others), (out,) = eqn.invars, eqn.outvars
    if others or not is_variable(operand) or operand.aval.dtype.name not in FLOATS:
        return None
    if eqn.primitive.name == "reshape":
        sizes = tuple(region.sizes[label] for label in known.labels)
        fits = all(v.aval.shape in (sizes, (*sizes, 1)) for v in (operand, out))
        number = Kind(False, known.labels)
        return {operand: number, out: number} if fits and eqn.params["dimensions"] is None else None
    places, rank = tuple(map(int, eqn.params["broadcast_dimensions"])), len(region.sizes)
    if operand not in region.kinds or known.wide or len(out.aval.shape) not in (rank, rank + 1):
        return None
    # A last dimension of 1 has no label.
    labels: list[int | None] = [None] * rank
    for label, place in zip(known.labels, places, strict=False):
        if place >= rank:
            return None
        labels[place] = label
    missing = iter(sorted({*range(rank)} - {*known.labels}))
    complete = tuple(next(missing) if label is None else label for label in labels)
    if out.aval.shape[:rank] != tuple(region.sizes[label] for label in complete):
        return None
    if len(places) > len(known.labels) and places[len(known.labels)] != rank:
        return None
    wide = len(out.aval.shape) > rank and out.aval.shape[rank] == region.columns
    return {operand: known, out: Kind(wide, complete)} if wide or out.aval.shape[rank:] in ((), (1,)) else None
