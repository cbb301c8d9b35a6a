"""What is known of a value: its rows, and the places where rows met on the way to it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bijax.transform.rows.layout import Layout, Shape

Kind = Literal["meet", "sum", "position", "noise", "order", "loop", "branch", "unknown", "routed"]


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """An operation where rows meet, or where a row's position enters.

    Attributes:
        kind: What happens there; `report.REASONS` says it in words.
        primitive: Name of the primitive.
        line: "FILE:LINE" of the user's program; may be empty.
    """

    kind: Kind
    primitive: str
    line: str


Places = frozenset[Place]
NONE: Places = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program.

    Attributes:
        rows: Where its rows lie; None if it belongs to no row.
        mixing: The places where rows met that changed rows: each row of this value, or each term of the sum that it
            is, depends on other rows or on its position.
        scaled: Those where a number that several rows share multiplied every row, such as the gradient of a mean over
            the tokens of a batch. In a sum over the batch that is harmless, in a row it is not.
        sums: For a value without rows: the reductions over the batch that it comes from.
        varies: For a value without rows: the axes along which it varies, with the place where that began.
        known: Its elements, for small arrays of integers that depend on nothing.
        parts: The columns along the last axis, for indices.
        routed: For an order of rows that the library chose, such as that of experts: the rows before.
    """

    rows: Layout | None = None
    mixing: Places = NONE
    scaled: Places = NONE
    sums: Places = NONE
    varies: frozenset[tuple[int, Place]] = frozenset()
    known: np.ndarray[Any, Any] | None = dataclasses.field(default=None, compare=False)
    parts: "tuple[Value, ...]" = dataclasses.field(default=(), compare=False)
    routed: Layout | None = None

    @property
    def touched(self) -> Places:
        """All places that this value depends on."""
        return self.mixing | self.scaled | self.sums


def combined(
    values: Iterable[Value],
    rows: Layout | None,
    *,
    varies: Iterable[tuple[int, Place]] = (),
    mixing: Iterable[Place] = (),
    sums: Iterable[Place] = (),
) -> Value:
    """Returns a value that is computed from others.

    Args:
        values: The operands.
        rows: Its rows.
        varies: As in `Value`; ignored with rows.
        mixing: Places where this operation mixes rows.
        sums: Places where it reduces rows.
    """
    values = list(values)
    found = {name: frozenset().union(*(getattr(v, name) for v in values)) for name in ("mixing", "scaled", "sums")}
    if rows is None:
        return Value(None, found["mixing"] | set(mixing), found["scaled"], found["sums"] | set(sums), frozenset(varies))
    shared = frozenset[Place]().union(*(v.sums for v in values if v.rows is None))
    return Value(rows, found["mixing"] | shared | set(mixing), found["scaled"])


def everywhere(shape: Shape, place: Place) -> frozenset[tuple[int, Place]]:
    """Returns that a value varies along all its axes."""
    return frozenset((axis, place) for axis, n in enumerate(shape) if n > 1)


def axes_moved(value: Value, axes: Mapping[int, int]) -> frozenset[tuple[int, Place]]:
    """Returns along which axes a value varies after its axes have moved; those without a new place are dropped."""
    return frozenset(
        (new, place) for axis, place in value.varies if (new := axes.get(axis, axis if axis < 0 else None)) is not None
    )


def met_along(value: Value, rows: Layout, here: Place) -> set[Place]:
    """Returns the places to report where a value without rows varies along the axes of rows.

    Args:
        value: The value, with the axes of `rows`.
        rows: The rows that it meets.
        here: The operation at which they meet, with the kind "position".
    """
    if value.rows is not None:
        return set()
    return {origin if origin.kind == "noise" else here for axis, origin in value.varies if axis in rows.axes}


def chosen(layouts: Sequence[Layout | None]) -> tuple[Layout | None, bool]:
    """Returns the rows of a value that has several operands, and whether these have different rows."""
    found = list(dict.fromkeys(rows for rows in layouts if rows is not None))
    if not found:
        return None, False
    return max(found, key=lambda rows: len(rows.factors)), len(found) > 1
