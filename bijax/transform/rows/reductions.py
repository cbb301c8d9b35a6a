"""Rules of operations along axes: reductions, prefixes, sorts, windows, factorisations."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

from bijax.transform.rows.flow import Flow, rule
from bijax.transform.rows.layout import moved
from bijax.transform.rows.value import Kind, Value, axes_moved, chosen, combined, everywhere, met_along


def reduced(flow: Flow, eqn: Any, values: list[Value], axes: Iterable[int], rank: int) -> Value:
    """Returns the result of a reduction.

    Args:
        flow: The flow.
        eqn: The equation.
        values: The operands, of one shape.
        axes: The axes that are reduced.
        rank: Number of axes of an operand.
    """
    gone = set(map(int, axes))
    kept = [a for a in range(rank) if a not in gone]
    places = {old: new for new, old in enumerate(kept)}
    rows, differ = chosen([v.rows for v in values])
    if rows is None:
        return combined(values, None, varies=frozenset().union(*(axes_moved(v, places) for v in values)))
    left = moved(rows, places)
    mixing = {flow.here(eqn, "meet")} if differ else set()
    for v in values:
        mixing |= met_along(v, rows, flow.here(eqn, "position"))
    if left is not None:
        return combined(values, left, mixing=mixing)
    shape = eqn.outvars[0].aval.shape
    return _summed(flow, eqn, values, everywhere(shape, flow.here(eqn, "position")), mixing)


def _summed(flow: Flow, eqn: Any, values: list[Value], varies: Any, mixing: Any = ()) -> Value:
    """Returns a value in which the rows are added up."""
    terms = [Value(None, v.mixing, v.scaled, v.sums) for v in values]
    return combined(terms, None, varies=varies, mixing=mixing, sums=[flow.here(eqn, "sum")])


@rule("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin")
def reduce_axes(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the result of a reduction over axes."""
    rank = len(eqn.invars[0].aval.shape)
    return [reduced(flow, eqn, values, eqn.params["axes"], rank) for _ in eqn.outvars]


@rule("reduce")
def reduce_program(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of a reduction by a function of one's own."""
    rank = len(eqn.invars[0].aval.shape)
    return [reduced(flow, eqn, values, eqn.params["dimensions"], rank) for _ in eqn.outvars]


def along_axes(flow: Flow, eqn: Any, values: list[Value], touched: Iterable[int], kind: Kind) -> list[Value]:
    """Returns the results of an operation that combines elements along axes and keeps them.

    Args:
        flow: The flow.
        eqn: The equation.
        values: The operands.
        touched: The axes along which it combines.
        kind: What happens to rows that lie along them.
    """
    axes = set(map(int, touched))
    rows, differ = chosen([v.rows for v in values])
    if rows is None:
        # Prefixes, factors and windows of equal elements differ; equal elements that are sorted do not.
        begun = {(a, flow.here(eqn, "position")) for a in axes} if kind != "order" else set()
        varies = begun.union(*(v.varies for v in values))
        ranks = [len(v.aval.shape) for v in eqn.outvars]
        return [combined(values, None, varies={(a, p) for a, p in varies if a < rank}) for rank in ranks]
    mixing = {flow.here(eqn, "meet")} if differ else set()
    if rows.axes & axes:
        mixing.add(flow.here(eqn, kind))
    else:
        for v in values:
            mixing |= met_along(v, rows, flow.here(eqn, "position"))
    return [combined(values, rows, mixing=mixing) for _ in eqn.outvars]


@rule("cumsum cumprod cummax cummin cumlogsumexp")
def cumulative(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the prefixes along an axis."""
    return along_axes(flow, eqn, values, [eqn.params["axis"]], "meet")


@rule("sort")
def sort(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns arrays sorted together."""
    return along_axes(flow, eqn, values, [eqn.params["dimension"]], "order")


@rule("top_k approx_top_k")
def top_k(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the largest elements along an axis."""
    rank = len(eqn.invars[0].aval.shape)
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % rank
    largest, places = along_axes(flow, eqn, values, [axis], "order")
    if places.rows is None:
        places = dataclasses.replace(places, varies=places.varies | {(axis, flow.here(eqn, "position"))})
    return [largest, places]


_TRAILING: Final = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqrf": 2,
    "geqp3": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 2,
}
"""Axes of one matrix or vector, which come last."""


@rule(" ".join((*_TRAILING, "fft")))
def of_matrices(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of an operation on the last axes."""
    name = eqn.primitive.name
    count = len(eqn.params["fft_lengths"]) if name == "fft" else _TRAILING[name]
    rank = max(len(v.aval.shape) for v in eqn.invars)
    return along_axes(flow, eqn, values, range(rank - count, rank), "meet")


def _window_axes(eqn: Any) -> Sequence[int]:
    """Returns the axes along which windows are longer than 1, move or dilate."""
    params = eqn.params
    found = set()
    for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"):
        found |= {a for a, n in enumerate(params.get(name) or ()) if n != 1}
    return sorted(found | {a for a, pads in enumerate(params.get("padding") or ()) if tuple(pads) != (0, 0)})


@rule(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add"
    " select_and_gather_add select_and_scatter"
)
def windows(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of an operation on windows."""
    return along_axes(flow, eqn, values, _window_axes(eqn), "meet")
