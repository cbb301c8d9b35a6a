"""Rules of products: matrices, ragged groups, convolutions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bijax.transform.rows.flow import Flow, rule, unknown
from bijax.transform.rows.layout import Layout, layout, moved
from bijax.transform.rows.value import Place, Value, axes_moved, combined, everywhere, met_along

Axes = Mapping[int, int]


def product(flow: Flow, eqn: Any, left: Value, right: Value, kept: tuple[Axes, Axes], summed: Axes) -> Value:
    """Returns the result of a product.

    Args:
        flow: The flow.
        eqn: The equation.
        left: The first operand.
        right: The second one.
        kept: For each operand, the axes of the result by its own axes; axes that both share go to one axis.
        summed: The axes of the second operand with which those of the first are contracted.
    """
    here, shape = flow.here(eqn, "position"), eqn.outvars[0].aval.shape
    shared = set(kept[0].values()) & set(kept[1].values())
    found = [v.rows and moved(v.rows, axes) for v, axes in zip((left, right), kept, strict=True)]
    contracted = [v.rows is not None and rows is None for v, rows in zip((left, right), found, strict=True)]
    present = [rows for rows in found if rows is not None]
    if not present and not any(contracted):
        if not (left.varies or right.varies):
            return combined([left, right], None)
        varies = {*axes_moved(left, kept[0]), *axes_moved(right, kept[1])}
        return combined([left, right], None, varies=varies)
    mixing: set[Place] = set()
    if present:
        rows = max(present, key=lambda r: len(r.factors))
        # A single row may be multiplied with the weights of another product, but not with another row.
        if any(contracted) or any(r != rows for r in present):
            mixing.add(flow.here(eqn, "meet"))
        for value, axes, own in zip((left, right), kept, found, strict=True):
            if value.rows is None and own is None:
                known = Value(varies=frozenset((a, p) for a, p in axes_moved(value, axes) if a in shared or a < 0))
                mixing |= met_along(known, rows, here)
        return combined([left, right], rows, mixing=mixing)
    # The rows are contracted: a sum over the batch.
    if all(contracted):
        same = left.rows and moved(left.rows, {**kept[0], **{a: 1000 + b for a, b in summed.items()}})
        other = right.rows and moved(right.rows, {**kept[1], **{b: 1000 + b for b in summed.values()}})
        if same != other:
            mixing.add(flow.here(eqn, "meet"))
    else:
        value, rows_of = (right, left.rows) if contracted[0] else (left, right.rows)
        pairs = {b: a for a, b in summed.items()} if contracted[0] else dict(summed)
        if rows_of is not None:
            mixing |= met_along(Value(varies=axes_moved(value, pairs)), rows_of, here)
    terms = [Value(None, v.mixing, v.scaled, v.sums) for v in (left, right)]
    return combined(terms, None, varies=everywhere(shape, here), mixing=mixing, sums=[flow.here(eqn, "sum")])


def _dot_axes(numbers: Any, ranks: tuple[int, int]) -> tuple[tuple[dict[int, int], dict[int, int]], dict[int, int]]:
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left_free = [a for a in range(ranks[0]) if a not in (*left_sum, *left_batch)]
    right_free = [a for a in range(ranks[1]) if a not in (*right_sum, *right_batch)]
    left = {a: n for n, a in enumerate([*left_batch, *left_free])}
    right = {a: n for n, a in enumerate(right_batch)}
    right |= {a: len(left) + n for n, a in enumerate(right_free)}
    return (left, right), dict(zip(left_sum, right_sum, strict=True))


@rule("dot_general")
def dot_general(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns a product of arrays."""
    ranks = len(eqn.invars[0].aval.shape), len(eqn.invars[1].aval.shape)
    return [product(flow, eqn, values[0], values[1], *_dot_axes(eqn.params["dimension_numbers"], ranks))]


@rule("ragged_dot_general")
def ragged_dot(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns a product with one matrix for each group of rows; which group a row is in follows its position."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    if len(eqn.params.get("group_sizes_shape", ())) > 1 or not list(numbers.rhs_group_dimensions):
        return unknown(flow, eqn, values)
    left, right, sizes = values
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    groups = set(numbers.rhs_group_dimensions)
    left_free = [a for a in range(len(eqn.invars[0].aval.shape)) if a not in (*left_sum, *left_batch)]
    right_free = [
        a for a in range(len(eqn.invars[1].aval.shape)) if a not in (*right_sum, *right_batch) and a not in groups
    ]
    kept = {a: n for n, a in enumerate([*left_batch, *left_free])}
    others = {a: n for n, a in enumerate(right_batch)} | {a: len(kept) + n for n, a in enumerate(right_free)}
    result = product(flow, eqn, left, right, (kept, others), dict(zip(left_sum, right_sum, strict=True)))
    ragged = set(numbers.lhs_ragged_dimensions)
    if result.rows is None:
        grouped = {(kept[a], flow.here(eqn, "position")) for a in ragged if a in kept}
        result = dataclasses.replace(result, varies=result.varies | grouped)
    if left.rows is not None and left.rows.axes & ragged:
        result = combined([result], result.rows, varies=result.varies, mixing=[flow.here(eqn, "position")])
    return [combined([result, Value(None, sizes.mixing, sizes.scaled, sizes.sums)], result.rows, varies=result.varies)]


@rule("conv_general_dilated")
def convolution(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns a convolution."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1:
        return unknown(flow, eqn, values)
    left, right = values
    along_space = [v.rows is not None and v.rows.axes & set(s[2:]) for v, s in zip(values, (lhs, rhs), strict=True)]
    if any(along_space):
        return [_mixed(flow, eqn, values)]
    kept: tuple[dict[int, int], dict[int, int]] = {lhs[0]: out[0]}, {rhs[0]: out[1]}
    here = flow.here(eqn, "position")
    if left.rows is None and right.rows is None:  # at the edges there are fewer terms; groups have their own features
        varies = {*axes_moved(left, kept[0]), *axes_moved(right, kept[1]), *((a, here) for a in out[2:])}
        varies |= {(out[1], place) for a, place in left.varies if a == lhs[1] and groups > 1}
        return [combined(values, None, varies=varies)]
    if groups == 1:
        return [product(flow, eqn, left, right, kept, {lhs[1]: rhs[1]})]
    grouped = left.rows and _of_groups(left.rows, lhs[1], eqn.invars[0].aval.shape[lhs[1]], groups, params, eqn, out[1])
    if left.rows is not None and left.rows.axes <= {lhs[1]} and grouped is None:
        return [_mixed(flow, eqn, values)]
    if grouped is None:
        return [product(flow, eqn, left, right, kept, {})]
    inner = dataclasses.replace(left, rows=moved(grouped, {out[1]: -1000}))
    other = right.rows and moved(right.rows, {rhs[0]: out[1]})
    mixing = {flow.here(eqn, "meet")} if other is not None and other != grouped else set()
    mixing |= met_along(Value(right.rows, varies=axes_moved(right, kept[1])), grouped, here)
    return [combined([inner, right], grouped, mixing=mixing)]


def _of_groups(rows: Layout, axis: int, length: int, groups: int, params: Any, eqn: Any, new: int) -> Layout | None:
    """Returns the rows along the features of the result, if rows are groups of features."""
    results = eqn.outvars[0].aval.shape[new]
    factors = []
    for f in rows.factors:
        if f.axis != axis or groups % (f.outer * f.size):
            return None
        factors.append(dataclasses.replace(f, axis=new, stride=results // (f.outer * f.size)))
    return layout(factors, rows.first)


def _mixed(flow: Flow, eqn: Any, values: list[Value]) -> Value:
    shape = eqn.outvars[0].aval.shape
    terms = [Value(None, v.mixing, v.scaled, v.sums) for v in values]
    here = flow.here(eqn, "position")
    return combined(terms, None, varies=everywhere(shape, here), mixing=[flow.here(eqn, "meet")])
