"""Where the rows of an array lie: on which axes, with which strides."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, order=True)
class Factor:
    """A digit of the row number in the index of one axis: index = (o * size + digit) * stride + i.

    Attributes:
        axis: The axis; negative for an axis that is not in the array: the iterations of a loop, the devices of a mesh.
        outer: Number of values of o.
        size: Number of digits.
        stride: Number of values of i.
        weight: What a digit adds to the row number.
    """

    axis: int
    outer: int
    size: int
    stride: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of an array. Row number = first + the sum of digit * weight over the factors.

    Attributes:
        factors: The factors, sorted; none if the array belongs to one row.
        first: Number of the first row.
    """

    factors: tuple[Factor, ...]
    first: int = 0

    @property
    def axes(self) -> frozenset[int]:
        """The axes that hold rows."""
        return frozenset(f.axis for f in self.factors)

    def on(self, axis: int) -> tuple[Factor, ...]:
        """Returns the factors of an axis."""
        return tuple(f for f in self.factors if f.axis == axis)


def along(axis: int, rows: int) -> Layout:
    """Returns the layout of an array with one row at each index of an axis."""
    return layout([Factor(axis, 1, rows, 1, 1)])


def layout(factors: Sequence[Factor], first: int = 0) -> Layout:
    """Returns a layout in its normal form: sorted, factors that continue each other merged, none of one digit."""
    merged: list[Factor] = []
    for factor in sorted((f for f in factors if f.size > 1), key=lambda f: (f.axis, -f.stride)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.axis == factor.axis
            and last.stride == factor.size * factor.stride
            and last.weight == factor.weight * factor.size
        ):
            merged[-1] = Factor(factor.axis, last.outer, last.size * factor.size, factor.stride, factor.weight)
        else:
            merged.append(factor)
    return Layout(tuple(merged), first)


def moved(rows: Layout, axes: Mapping[int, int]) -> Layout | None:
    """Returns the layout after axes have moved; None if an axis with rows has no new place.

    Args:
        rows: The layout.
        axes: New axis by old axis; axes outside the array keep their number unless they are named.
    """
    factors = []
    for factor in rows.factors:
        new = axes.get(factor.axis, factor.axis if factor.axis < 0 else None)
        if new is None:
            return None
        factors.append(dataclasses.replace(factor, axis=new))
    return layout(factors, rows.first)


def reshaped(rows: Layout, old: Shape, new: Shape) -> Layout | None:
    """Returns the layout after a reshape; None if it takes rows apart in a way that no layout describes."""
    factors = []
    for factor in rows.factors:
        if factor.axis < 0:
            factors.append(factor)
            continue
        begin = factor.stride * math.prod(old[factor.axis + 1 :])
        end = begin * factor.size
        pieces = 1
        for axis, (inner, outer) in enumerate(_spans(new)):
            low, high = max(begin, inner), min(end, outer)
            if low >= high:
                continue
            if low % begin or high % low or low % inner or outer % high:
                return None
            piece = Factor(axis, outer // high, high // low, low // inner, factor.weight * (low // begin))
            pieces *= piece.size
            factors.append(piece)
        if pieces != factor.size:
            return None
    return layout(factors, rows.first)


def overlapping(axis: int, old: Shape, new: Shape) -> list[int]:
    """Returns the axes that hold a part of an axis after a reshape."""
    begin, end = _spans(old)[axis]
    return [a for a, (inner, outer) in enumerate(_spans(new)) if max(begin, inner) < min(end, outer)]


def _spans(shape: Shape) -> list[tuple[int, int]]:
    """Returns for each axis the distance of neighbours in memory, and that times its length."""
    return [(math.prod(shape[a + 1 :]), math.prod(shape[a:])) for a in range(len(shape))]


def sliced(rows: Layout, axis: int, start: int, limit: int, step: int, length: int) -> Layout | None:
    """Returns the layout after a slice of one axis of a length; None if no layout describes it."""
    found = rows.on(axis)
    if not found or (start, limit, step) == (0, length, 1):
        return rows
    if len(found) > 1 or limit <= start:
        return None
    (f,) = found
    others = [g for g in rows.factors if g != f]
    block = f.size * f.stride
    if step > 1:
        return _strided(rows, f, others, start, limit, step)
    if start % block == 0 and limit % block == 0:
        return layout([*others, dataclasses.replace(f, outer=(limit - start) // block)], rows.first)
    if start // block != (limit - 1) // block:
        return None
    low = start % block
    high = low + limit - start
    if low % f.stride == 0 and high % f.stride == 0:
        kept = Factor(axis, 1, (high - low) // f.stride, f.stride, f.weight)
    elif low // f.stride == (high - 1) // f.stride:
        kept = Factor(axis, 1, 1, high - low, f.weight)
    else:
        return None
    return layout([*others, kept], rows.first + low // f.stride * f.weight)


def _strided(rows: Layout, f: Factor, others: list[Factor], start: int, limit: int, step: int) -> Layout | None:
    if f.outer == 1 and f.stride == 1:
        kept = Factor(f.axis, 1, -(-(limit - start) // step), 1, f.weight * step)
        return layout([*others, kept], rows.first + start * f.weight)
    if f.stride % step == 0 and start < step and limit > f.outer * f.size * f.stride - step:
        return layout([*others, dataclasses.replace(f, stride=f.stride // step)], rows.first)
    return None


def padded(rows: Layout, axis: int, low: int, high: int, interior: int) -> Layout | None:
    """Returns the layout after padding of an axis; padding along rows counts as more rows."""
    found = rows.on(axis)
    if not found or (low, high, interior) == (0, 0, 0):
        return rows
    f = found[0]
    if len(found) > 1 or interior or f.outer > 1 or low % f.stride or high % f.stride:
        return None
    others = [g for g in rows.factors if g != f]
    size = f.size + (low + high) // f.stride
    return layout([*others, dataclasses.replace(f, size=size)], rows.first - low // f.stride * f.weight)


def reversed_along(rows: Layout, axes: Sequence[int]) -> Layout:
    """Returns the layout after the order of some axes is reversed."""
    first, factors = rows.first, []
    for f in rows.factors:
        if f.axis in axes:
            first += (f.size - 1) * f.weight
            f = dataclasses.replace(f, weight=-f.weight)
        factors.append(f)
    return layout(factors, first)


def joined(parts: Sequence[tuple[Layout | None, int]], axis: int) -> Layout | None:
    """Returns the layout of a concatenation; None if no layout describes it.

    Args:
        parts: The layout, or None for an array without rows, and the length along the axis, of each operand; at least
            one has rows.
        axis: The axis.
    """
    layouts = [rows for rows, _ in parts if rows is not None]
    if not any(rows.on(axis) for rows in layouts) and len(set(layouts)) == 1 and layouts[0].factors:
        return layouts[0]
    if len(layouts) == len(parts) and len(set(parts)) == 1 and layouts[0].on(axis):
        factors = [
            dataclasses.replace(f, outer=f.outer * len(parts)) if f.axis == axis else f for f in layouts[0].factors
        ]
        return layout(factors, layouts[0].first)
    return _continued(parts, axis)


def _continued(parts: Sequence[tuple[Layout | None, int]], axis: int) -> Layout | None:
    """Returns the layout of row ranges that continue each other, arrays without rows counting as padding."""
    model = next((f for rows, _ in parts if rows is not None for f in rows.on(axis)), None)
    if model is None:  # single rows
        firsts = [rows.first for rows, _ in parts if rows is not None]
        lengths = {length for _, length in parts}
        if len(firsts) < 2 or len(firsts) != len(parts) or len(lengths) > 1 or any(r and r.factors for r, _ in parts):
            return None
        model = Factor(axis, 1, 1, lengths.pop(), firsts[1] - firsts[0])
    others: set[Any] = set()
    first: int | None = None
    count = 0
    for rows, length in parts:
        if length % model.stride:
            return None
        digits = length // model.stride
        if rows is not None:
            own = rows.on(axis)
            if any((f.outer, f.stride, f.weight) != (1, model.stride, model.weight) for f in own) or (
                not own and digits != 1
            ):
                return None
            others.add(tuple(f for f in rows.factors if f.axis != axis))
            begin = rows.first - count * model.weight
            if first is not None and begin != first:
                return None
            first = begin
        count += digits
    if first is None or len(others) > 1:
        return None
    return layout([*others.pop(), dataclasses.replace(model, outer=1, size=count)], first)
