"""Rules of operations that move or create values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bijax.transform.rows.flow import Flow, rule
from bijax.transform.rows.layout import Layout, joined, moved, overlapping, padded, reshaped, reversed_along, sliced
from bijax.transform.rows.value import Value, axes_moved, chosen, combined, everywhere, met_along


def placed(
    flow: Flow, eqn: Any, operands: list[Value], rows: Layout | None, varies: Any = (), *, is_lost: bool = False
) -> Value:
    """Returns the result of a movement; `is_lost` if rows went to places that no layout describes."""
    is_known = any(p.kind == "routed" for v in operands for p in v.mixing)
    return combined(
        [Value(None, v.mixing, v.scaled, v.sums) for v in operands] if is_lost else operands,
        rows,
        varies=varies,
        mixing=[flow.here(eqn, "order")] if is_lost and not is_known else [],
    )


def _remapped(flow: Flow, eqn: Any, value: Value, axes: dict[int, int], known: Any = None) -> list[Value]:
    if value.rows is None:
        return [Value(None, value.mixing, value.scaled, value.sums, axes_moved(value, axes), known)]
    rows = moved(value.rows, axes)
    return [placed(flow, eqn, [value], rows, is_lost=rows is None)]


def _apply(value: Value, function: Any) -> Any:
    return None if value.known is None else function(value.known)


@rule("transpose")
def transpose(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a transposition."""
    order = eqn.params["permutation"]
    axes = {old: new for new, old in enumerate(order)}
    return _remapped(flow, eqn, values[0], axes, _apply(values[0], lambda a: a.transpose(order)))


@rule("broadcast_in_dim")
def broadcast_in_dim(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a broadcast; along new axes nothing varies."""
    shape, own = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    target = eqn.params["broadcast_dimensions"]
    axes = {old: new for old, new in enumerate(target) if own[old] == shape[new]}

    def spread(array: Any) -> Any:
        wide = np.reshape(array, [own[target.index(a)] if a in target else 1 for a in range(len(shape))])
        return np.broadcast_to(wide, shape) if math.prod(shape) <= 1 << 16 else None

    return _remapped(flow, eqn, values[0], axes, _apply(values[0], spread))


@rule("squeeze expand_dims")
def squeeze(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result without, or with, axes of length 1."""
    return reshape(flow, eqn, values)


@rule("reshape bitcast_convert_type random_wrap random_unwrap")
def reshape(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a reshape, or of a conversion that adds or removes the last axis."""
    value, old, new = values[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if math.prod(old) != math.prod(new):  # the last axis holds the parts of a number
        (result,) = _remapped(flow, eqn, value, {a: a for a in range(min(len(old), len(new)))})
        if result.rows is None and len(new) > len(old):
            result = dataclasses.replace(
                result, varies=result.varies | {(len(old), flow.here(eqn, "position"))}, known=None
            )
        return [result]
    order = eqn.params["dimensions"] if eqn.primitive.name == "reshape" else None
    if order is not None:  # transposed first
        turned = {place: axis for axis, place in enumerate(order)}
        (value,) = _remapped(flow, eqn, value, turned, _apply(value, lambda a: a.transpose(order)))
        old = tuple(old[axis] for axis in order)
    return [_reshaped(flow, eqn, value, old, new)]


def _reshaped(flow: Flow, eqn: Any, value: Value, old: tuple[int, ...], new: tuple[int, ...]) -> Value:
    if value.rows is None:
        varies = {(n, place) for a, place in value.varies for n in (overlapping(a, old, new) if a >= 0 else [a])}
        known = _apply(value, lambda a: a.reshape(new))
        return Value(None, value.mixing, value.scaled, value.sums, frozenset(varies), known)
    rows = reshaped(value.rows, old, new)
    return placed(flow, eqn, [value], rows, is_lost=rows is None)


@rule("rev")
def rev(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a reversal."""
    value = values[0]
    rows = value.rows and reversed_along(value.rows, eqn.params["dimensions"])
    return [combined(values, rows, varies=value.varies)]


@rule("slice")
def slice_(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a slice with constant bounds."""
    value, shape = values[0], eqn.invars[0].aval.shape
    bounds = (eqn.params["start_indices"], eqn.params["limit_indices"], eqn.params["strides"] or (1,) * len(shape))
    return [_sliced(flow, eqn, value, shape, bounds)]


def _sliced(flow: Flow, eqn: Any, value: Value, shape: tuple[int, ...], bounds: Any) -> Value:
    if value.rows is None:
        index = tuple(slice(*b) for b in zip(*bounds, strict=True))
        out = [len(range(*b)) for b in zip(*bounds, strict=True)]
        varies = frozenset((a, p) for a, p in value.varies if a < 0 or out[a] > 1)
        return Value(None, value.mixing, value.scaled, value.sums, varies, _apply(value, lambda a: a[index]))
    rows: Layout | None = value.rows
    for axis, (start, limit, step) in enumerate(zip(*bounds, strict=True)):
        rows = rows and sliced(rows, axis, start, limit, step, shape[axis])
    return placed(flow, eqn, [value], rows, is_lost=rows is None)


@rule("split bijax_cut")
def split(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the parts of an array."""
    return _parts(flow, eqn, values[0], eqn.params["sizes"])


@rule("unstack")
def unstack(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the entries along an axis, without it; `a, b = jax.random.split(key)` is one."""
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    parts = _parts(flow, eqn, values[0], [1] * shape[axis])
    one, without = (*shape[:axis], 1, *shape[axis + 1 :]), (*shape[:axis], *shape[axis + 1 :])
    return [_reshaped(flow, eqn, part, one, without) for part in parts]


def _parts(flow: Flow, eqn: Any, value: Value, sizes: Sequence[int]) -> list[Value]:
    """Returns the parts of an array that is cut along the axis of an equation."""
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    results, start = [], 0
    for size in sizes:
        low, high = [0] * len(shape), list(shape)
        low[axis], high[axis] = start, start + size
        results.append(_sliced(flow, eqn, value, shape, (low, high, [1] * len(shape))))
        start += size
    return results


@rule("concatenate bijax_join")
def concatenate(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the concatenation of arrays."""
    axis, shapes = eqn.params["dimension"], [v.aval.shape for v in eqn.invars]
    if all(v.rows is None for v in values):
        place = flow.here(eqn, "position")
        varies = frozenset().union({(axis, place)}, *(v.varies for v in values))
        result = combined(values, None, varies=varies)
    else:
        parts = [(v.rows, shape[axis]) for v, shape in zip(values, shapes, strict=True)]
        rows = joined(parts, axis)
        result = placed(flow, eqn, values, rows, is_lost=rows is None)
        if rows is not None:
            result = _met(flow, eqn, values, rows, result, axis)
    if axis == len(shapes[0]) - 1 and np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        columns = [p for v, s in zip(values, shapes, strict=True) for p in (v.parts or (v,) * s[axis])]
        result = Value(result.rows, result.mixing, result.scaled, result.sums, result.varies, None, tuple(columns))
    return [result]


def _met(flow: Flow, eqn: Any, values: list[Value], rows: Layout, result: Value, axis: int) -> Value:
    here = flow.here(eqn, "position")
    others = [(a, p) for a, p in ((f.axis, None) for f in rows.factors) if a != axis]
    kept = {a for a, _ in others}
    mixing: set[Any] = set()
    for v in values:
        found = Value(varies=frozenset((a, p) for a, p in v.varies if a in kept))
        mixing |= met_along(found, rows, here) if v.rows is None else set()
    return Value(rows, result.mixing | mixing, result.scaled, parts=result.parts)


@rule("stack")
def stack(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns arrays stacked along a new axis."""
    axis = eqn.params.get("axis", 0)
    rank = len(eqn.outvars[0].aval.shape)
    axes = {a: a + (a >= axis) for a in range(rank - 1)}
    rows, differ = chosen([v.rows for v in values])
    if rows is None:
        varies = frozenset().union({(axis, flow.here(eqn, "position"))}, *(axes_moved(v, axes) for v in values))
        return [combined(values, None, varies=varies)]
    mixing = {flow.here(eqn, "order")} if differ else set()
    for v in values:
        mixing |= met_along(v, rows, flow.here(eqn, "position"))
    return [combined(values, moved(rows, axes), mixing=mixing)]


@rule("pad")
def pad(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of padding; padding along the batch counts as more rows."""
    rows, _ = chosen([v.rows for v in values])
    if rows is None:
        place = flow.here(eqn, "position")
        grown = {(a, place) for a, config in enumerate(eqn.params["padding_config"]) if any(config)}
        return [combined(values, None, varies=grown.union(*(v.varies for v in values)))]
    for axis, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        rows = rows and padded(rows, axis, int(low), int(high), int(interior))
    return [placed(flow, eqn, values, rows, is_lost=rows is None)]


@rule("iota")
def iota(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the positions along an axis."""
    aval, axis = eqn.outvars[0].aval, eqn.params["dimension"]
    known = None
    if math.prod(aval.shape) <= 1 << 16 and np.issubdtype(aval.dtype, np.integer):
        line = np.arange(aval.shape[axis], dtype=aval.dtype)
        known = np.broadcast_to(line.reshape([-1 if a == axis else 1 for a in range(len(aval.shape))]), aval.shape)
    return [
        Value(
            varies=frozenset({(axis, flow.here(eqn, "position"))}) if aval.shape[axis] > 1 else frozenset(), known=known
        )
    ]


@rule("empty create_token dim_as_value platform_index")
def created(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns values that come from nowhere and are equal everywhere."""
    return [Value() for _ in eqn.outvars]


@rule("random_seed random_bits random_split rng_bit_generator rng_uniform iota_2x32_shape")
def drawn(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns random numbers or keys: those of one key follow the position in the array.

    The axes of the keys come first. With a key for each row, a row's numbers are its own.
    """
    name = eqn.primitive.name
    results = []
    for v in eqn.outvars:
        rows, _ = chosen([value.rows for value in values])
        keyed = len(eqn.invars[0].aval.shape) if name in ("random_bits", "random_split", "random_seed") else 0
        noise = flow.here(eqn, "noise")
        varies = {(a, p) for a, p in everywhere(v.aval.shape, noise) if a >= keyed}
        varies |= {(a, noise) for value in values for a, _ in value.varies}
        if rows is not None and name in ("rng_bit_generator", "rng_uniform"):
            results.append(placed(flow, eqn, values, None, everywhere(v.aval.shape, noise), is_lost=True))
        else:
            results.append(combined(values, rows, varies=varies))
    return results
