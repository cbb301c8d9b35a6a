"""Rules of operations with computed indices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bijax.transform.rows.flow import Flow, rule
from bijax.transform.rows.layout import Layout, moved, sliced
from bijax.transform.rows.moves import placed
from bijax.transform.rows.value import Place, Value, axes_moved, chosen, combined, everywhere, met_along


@rule("dynamic_slice")
def dynamic_slice(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a slice at a computed position."""
    value, starts = values[0], values[1:]
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    asked, differ = chosen([v.rows for v in starts])
    if value.rows is None:
        varies = {(a, p) for v in values for a, p in v.varies if a < 0 or sizes[a] > 1}
        mixing = {flow.here(eqn, "meet")} if differ else set()
        if asked is not None:
            mixing |= met_along(Value(varies=frozenset(varies)), asked, flow.here(eqn, "position"))
        return [combined(values, asked, varies=varies, mixing=mixing)]
    rows: Layout | None = value.rows
    for axis in sorted(value.rows.axes):
        if axis < 0 or sizes[axis] == shape[axis] or rows is None:
            continue
        known = starts[axis].known
        start = min(max(int(known), 0), shape[axis] - sizes[axis]) if known is not None else None
        rows = None if start is None else sliced(rows, axis, start, start + sizes[axis], 1, shape[axis])
    return [placed(flow, eqn, values, rows, is_lost=rows is None)]


@rule("dynamic_update_slice")
def dynamic_update_slice(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns an array with a part written at a computed position."""
    array, update = values[:2]
    shape, size = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    asked, _ = chosen([v.rows for v in values[2:]])
    rows = array.rows or update.rows or asked
    if rows is None:
        partly = {(a, flow.here(eqn, "position")) for a, n in enumerate(shape) if size[a] != n}
        return [combined(values, None, varies=partly.union(*(v.varies for v in values)))]
    if any(axis >= 0 and size[axis] != shape[axis] for axis in rows.axes):
        return [placed(flow, eqn, values, None, everywhere(shape, flow.here(eqn, "position")), is_lost=True)]
    differ = array.rows is not None and update.rows not in (None, array.rows)
    mixing = {flow.here(eqn, "meet")} if differ else set()
    mixing |= met_along(array, rows, flow.here(eqn, "position")) | met_along(update, rows, flow.here(eqn, "position"))
    return [combined(values, rows, mixing=mixing)]


def _columns(value: Value, count: int) -> tuple[Value, ...]:
    """Returns the columns of an array of indices."""
    return value.parts if len(value.parts) == count else (value,) * count


def _own_row(column: Value, shape: tuple[int, ...], length: int) -> int | None:
    """Returns the axis along which a column of indices counts 0, 1, 2, ..., so that each row has its own index.

    Args:
        column: The column.
        shape: Shape of the indices without the last axis.
        length: Length of the axis that is indexed.
    """
    if column.known is None or column.known.size != np.prod(shape, dtype=int):
        return None
    array = column.known.reshape(shape)
    for axis, n in enumerate(shape):
        line = np.arange(n).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        if n == length and (array == line).all():
            return axis
    return None


@rule("gather")
def gather(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns elements at computed indices."""
    array, index = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, index_shape = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[:-1]
    rank = len(eqn.outvars[0].aval.shape)
    batch = [a for a in range(rank) if a not in numbers.offset_dims]  # axes of the result that are of the indices
    of_index = dict(enumerate(batch))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = dict(zip([a for a in range(len(shape)) if a not in gone], numbers.offset_dims, strict=True))
    of_array = {a: o for a, o in windows.items() if sizes[a] == shape[a]}
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    paired = {a: of_index[i] for a, i in pairs}
    columns = _columns(index, len(numbers.start_index_map))
    own = {
        axis: of_index[place]
        for axis, column in zip(numbers.start_index_map, columns, strict=True)
        if axis in gone and (place := _own_row(column, index_shape, shape[axis])) is not None
    }
    rest = [c for a, c in zip(numbers.start_index_map, columns, strict=True) if a not in own]
    others = _joined_columns(flow, eqn, index, rest)
    if array.rows is None:  # along a part of an axis it varies too
        of_array = windows
    result = _gathered(flow, eqn, array, others, {**of_array, **paired, **own}, of_index)
    if array.rows is None and index.rows is not None and result.rows is not None:
        # Rows in the order of their experts are taken back to the order of the tokens.
        result = dataclasses.replace(result, mixing=frozenset(p for p in result.mixing if p.kind != "routed"))
    return [result]


def _joined_columns(flow: Flow, eqn: Any, index: Value, columns: list[Value]) -> Value:
    """Returns what is known of an array of indices without the columns that name each row's own index."""
    if not columns or not index.parts:
        return index if columns else Value()
    rows, _ = chosen([c.rows for c in columns])
    if rows is None:
        return combined(columns, None, varies=frozenset().union(*(c.varies for c in columns)))
    here = flow.here(eqn, "position")
    return combined(columns, rows, mixing={p for c in columns for p in met_along(c, rows, here)})


def _gathered(
    flow: Flow, eqn: Any, array: Value, index: Value, of_array: dict[int, int], of_index: dict[int, int]
) -> Value:
    here = flow.here(eqn, "position")
    rows = array.rows and moved(array.rows, of_array)
    if array.rows is not None and rows is None:
        return placed(flow, eqn, [array, index], None, everywhere(eqn.outvars[0].aval.shape, here), is_lost=True)
    asked = index.rows and moved(index.rows, of_index)
    if index.rows is not None and asked is None:
        return placed(flow, eqn, [array, index], None, everywhere(eqn.outvars[0].aval.shape, here), is_lost=True)
    if rows is None and asked is None:
        varies = axes_moved(array, of_array) | axes_moved(index, of_index)
        return combined([array, index], None, varies=varies)
    found = rows or asked
    mixing: set[Place] = set()
    if rows is not None and asked is not None and rows != asked:
        mixing.add(flow.here(eqn, "meet"))
    if found is not None:
        for value, axes in ((array, of_array), (index, of_index)):
            if value.rows is None:
                mixing |= met_along(Value(varies=axes_moved(value, axes)), found, here)
    return combined([array, index], found, mixing=mixing)


@rule("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
def scatter(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns an array with elements written at computed indices."""
    array, index, update = values
    numbers = eqn.params["dimension_numbers"]
    shape, index_shape = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[:-1]
    update_shape = eqn.invars[2].aval.shape
    scattered = [a for a in range(len(update_shape)) if a not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [a for a in range(len(shape)) if a not in gone]
    of_update = {u: a for u, a in zip(numbers.update_window_dims, windows, strict=True) if update_shape[u] == shape[a]}
    of_index = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    columns = _columns(index, len(numbers.scatter_dims_to_operand_dims))
    rest = []
    for axis, column in zip(numbers.scatter_dims_to_operand_dims, columns, strict=True):
        place = _own_row(column, index_shape, shape[axis]) if axis in gone else None
        if place is None:
            rest.append(column)
        else:
            of_index[place] = axis
    of_update |= {scattered[i]: a for i, a in of_index.items()}
    return [_scattered(flow, eqn, array, _joined_columns(flow, eqn, index, rest), update, of_index, of_update)]


def _scattered(
    flow: Flow,
    eqn: Any,
    array: Value,
    index: Value,
    update: Value,
    of_index: dict[int, int],
    of_update: dict[int, int],
) -> Value:
    here, shape = flow.here(eqn, "position"), eqn.outvars[0].aval.shape
    values = [array, index, update]
    found = [(v.rows, v.rows and moved(v.rows, axes)) for v, axes in ((index, of_index), (update, of_update))]
    aligned = set(of_update.values())
    strays = any(own is not None and new is None for own, new in found)
    rows = array.rows or next((new for _, new in found if new is not None), None)
    if rows is None:
        if not strays:
            written = {(a, p) for a, p in everywhere(shape, here) if a not in aligned}
            varies = array.varies | axes_moved(index, of_index) | axes_moved(update, of_update) | written
            return combined(values, None, varies=varies)
        terms = [Value(None, v.mixing, v.scaled, v.sums) for v in values]
        return combined(terms, None, varies=everywhere(shape, here), sums=[flow.here(eqn, "sum")])
    if strays or any(a >= 0 and a not in aligned for a in rows.axes):
        return placed(flow, eqn, values, None, everywhere(shape, here), is_lost=True)
    mixing = {flow.here(eqn, "meet")} if any(new not in (None, rows) for _, new in found) else set()
    for value, axes in ((array, {a: a for a in range(len(shape))}), (index, of_index), (update, of_update)):
        if value.rows is None:
            mixing |= met_along(Value(varies=axes_moved(value, axes)), rows, here)
    return combined(values, rows, mixing=mixing)
