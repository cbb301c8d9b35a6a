"""Rules of the library's own kernels."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from bijax.transform.rows.flow import Flow, rule
from bijax.transform.rows.products import product
from bijax.transform.rows.reductions import reduced
from bijax.transform.rows.value import Place, Places, Value, chosen, combined, everywhere

ROWS: Final = (
    "attention attention_gradients attention_score_gradients cross_entropy cross_entropy_gradient largest layer_norm"
    " layer_norm_gradient log_softmax log_softmax_gradient logsumexp logsumexp_gradient quantize"
    " quantize_norm quantize_swiglu rms_norm rms_norm_gradient rotate select_experts softmax softmax_gradient sum_rows"
    " variance variance_gradient"
)
"""Kernels whose arrays of two and more axes have rows in front, and whose other arrays are shared by all rows."""

_GRADIENTS: Final = "norm_weight_gradient embed_gradient"
"""Kernels that add over the rows in front."""


@rule(" ".join(f"bijax_{name}" for name in ROWS.split()))
def of_rows(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of a kernel that computes each row by itself."""
    rows, differ = chosen([v.rows for v in values])
    if rows is None:
        differ = "attention" in eqn.primitive.name or any(v.varies for v in values)  # queries have different keys
        here = flow.here(eqn, "position")
        return [combined(values, None, varies=everywhere(v.aval.shape, here) if differ else ()) for v in eqn.outvars]
    shapes = [v.aval.shape for v in eqn.invars]
    length = next(s[0] for s, v in zip(shapes, values, strict=True) if v.rows == rows and s)
    meets = differ or any(
        v.rows is not None and (len(s) < 2 or v.rows.axes - {0}) for s, v in zip(shapes, values, strict=True)
    )
    mixing = {flow.here(eqn, "meet")} if meets and rows.factors else set()
    position = flow.here(eqn, "position")
    for value, shape in zip(values, shapes, strict=True):
        if value.rows is None and len(shape) > 1 and shape[0] == length and any(a == 0 for a, _ in value.varies):
            mixing.add(next((p for a, p in value.varies if a == 0 and p.kind == "noise"), position))
    results = []
    for v in eqn.outvars:
        if not rows.factors or (v.aval.shape[:1] == (length,) and len(v.aval.shape) > 1):
            results.append(combined(values, rows, mixing=mixing))
        else:
            terms = [Value(None, x.mixing, x.scaled, x.sums) for x in values]
            varies = everywhere(v.aval.shape, position)
            results.append(combined(terms, None, varies=varies, mixing=mixing, sums=[flow.here(eqn, "sum")]))
    return results


@rule(" ".join(f"bijax_{name}" for name in _GRADIENTS.split()))
def over_rows(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of a kernel that adds over the rows in front."""
    arrays = [Value(v.rows, v.mixing, v.scaled, v.sums) for v in values]
    return [reduced(flow, eqn, arrays, [0], 2) for _ in eqn.outvars]


@rule("bijax_linear_cross_entropy_gradients bijax_rms_norm_gradients")
def of_rows_and_over_rows(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of a kernel of which the first has rows, and the second adds over them."""
    return [of_rows(flow, eqn, values)[0], over_rows(flow, eqn, values)[1]]


@rule("bijax_matmul bijax_joined_matmul bijax_k_split_matmul bijax_fused_matmul bijax_quantized_product")
def matmul(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns (M, K) times (K, N); other operands belong to the rows or to the columns."""
    left, right, *more = values
    result = product(flow, eqn, left, right, ({0: 0}, {1: 1}), {1: 0})
    return [_with_more(flow, eqn, result, more)]


@rule("bijax_stacked_matmul")
def stacked_matmul(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns (G, M, K) times (G, K, N), or one matrix for all."""
    left, right, *more = values
    matrix = len(eqn.invars[1].aval.shape) == 2
    kept = ({0: 0, 1: 1}, {1: 2} if matrix else {0: 0, 2: 2})
    return [_with_more(flow, eqn, product(flow, eqn, left, right, kept, {2: 0 if matrix else 1}), more)]


@rule("bijax_weight_gradient")
def weight_gradient(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the transpose of (M, K) times (M, N)."""
    left, right, *more = values
    return [_with_more(flow, eqn, product(flow, eqn, left, right, ({1: 0}, {1: 1}), {0: 0}), more)]


@rule("bijax_stacked_weight_gradient")
def stacked_weight_gradient(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the transposes of (G, M, K) times (G, M, N); one of them may be a matrix."""
    left, right, *more = values
    kept = []
    for place, atom in enumerate(eqn.invars[:2]):
        kept.append({0: 0, 2: 1 + place} if len(atom.aval.shape) == 3 else {1: 1 + place})
    pairs = {len(eqn.invars[0].aval.shape) - 2: len(eqn.invars[1].aval.shape) - 2}
    return [_with_more(flow, eqn, product(flow, eqn, left, right, (kept[0], kept[1]), pairs), more)]


def _with_more(flow: Flow, eqn: Any, result: Value, more: list[Value]) -> Value:
    """Returns the result of a product with more operands, such as a bias, a residual, or scales."""
    others = [v.rows for v in more if v.rows is not None]
    mixing = {flow.here(eqn, "meet")} if any(rows != result.rows for rows in others) else set()
    rest = [v if v.rows == result.rows else Value(None, v.mixing, v.scaled, v.sums) for v in more]
    differ = any(v.varies for v in more)
    varies = everywhere(eqn.outvars[0].aval.shape, flow.here(eqn, "position")) if differ else result.varies
    return combined([result, *rest], result.rows, varies=varies, mixing=mixing)


@rule("bijax_sum_axis")
def sum_axis(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the sums of (A, R, B) over R."""
    return [reduced(flow, eqn, values[:1], [1], 3)]


@rule("bijax_tree_sum")
def tree_sum(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the sum of terms (n, ...) over n."""
    return [reduced(flow, eqn, values, [0], len(eqn.invars[0].aval.shape))]


@rule("bijax_paged_attention")
def paged_attention(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns attention over pages; a row reads the pages in its own table, as the library wrote them."""
    return of_rows(flow, eqn, [dataclasses.replace(v, sums=_without_routed(v.sums)) for v in values])


@rule("bijax_rotate_and_store")
def rotate_and_store(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns rotated heads, and caches with the new keys and values at the places of their sequences."""
    heads, cos, sin, places, keys, cached, *more = values
    here = flow.here(eqn, "routed")
    new = [heads, cos, sin, *more]
    rows, differ = chosen([v.rows for v in new])
    mixing = {flow.here(eqn, "meet")} if differ else set()
    position = flow.here(eqn, "position")
    rotated = combined(new, rows, varies=everywhere(eqn.outvars[0].aval.shape, position), mixing=mixing)
    asked = Value(places.rows, frozenset(p for p in places.mixing if p.kind != "position"), places.scaled, places.sums)
    results = [rotated]
    for cache, v in zip((keys, cached), eqn.outvars[1:], strict=True):
        if cache.rows is not None:
            results.append(combined([cache, rotated, asked], cache.rows))
            continue
        terms = [Value(None, x.mixing, x.scaled, x.sums) for x in (cache, rotated, asked)]
        stored = [] if rows is None else [here]
        results.append(combined(terms, None, varies=everywhere(v.aval.shape, position), sums=stored))
    return results


@rule("bijax_sort_by_expert bijax_rows_by_count", partly=True)
def sort_by_expert(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the places of tokens in the order of their experts; `rows_of_tokens` leads back, as one result does.

    The scalar result says whether there was room for all rows, which is so unless the caller asked for less.
    """
    (value,) = values
    if value.rows is None and not value.routed:
        return [
            combined(values, None, varies=everywhere(v.aval.shape, flow.here(eqn, "position"))) for v in eqn.outvars
        ]
    routed = flow.here(eqn, "routed")
    results = [
        dataclasses.replace(
            _lost(flow, eqn, values, v.aval.shape), mixing=value.mixing | {routed}, routed=value.rows or value.routed
        )
        if v.aval.shape
        else Value()
        for v in eqn.outvars
    ]
    if len(results) > _OWN_ROWS and value.rows is not None:
        results[_OWN_ROWS] = Value(value.rows, value.mixing, value.scaled)
    return results


_OWN_ROWS: Final = 5
"""Which result of a sort by expert is the row of each place, in the order of the tokens."""


@rule("bijax_spread_to_experts", partly=True)
def spread_to_experts(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns tokens in the order of their experts, the numbers of the experts' rows, and the row of each place."""
    x, number = values
    shapes = [v.aval.shape for v in eqn.outvars]
    if number.rows is None and not number.routed:
        return [combined(values, None, varies=everywhere(shape, flow.here(eqn, "position"))) for shape in shapes]
    routed, source = flow.here(eqn, "routed"), number.rows or number.routed
    rows = dataclasses.replace(
        _lost(flow, eqn, [x, number], shapes[0]), mixing=x.mixing | number.mixing | {routed}, routed=source
    )
    count = dataclasses.replace(_lost(flow, eqn, [number], shapes[1]), mixing=number.mixing | {routed}, routed=source)
    own = count if number.rows is None else Value(number.rows, number.mixing, number.scaled)
    return [rows, count, own]


@rule("bijax_rows_of_tokens")
def rows_of_tokens(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the row of each token's place, in the order of the tokens."""
    (value,) = values
    if value.routed is None:
        return [_lost(flow, eqn, values, v.aval.shape) for v in eqn.outvars]
    return [Value(value.routed, _without_routed(value.mixing), value.scaled) for _ in eqn.outvars]


@rule("bijax_add_expert_rows")
def add_expert_rows(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns sums of rows, each token's own, in the order of the tokens."""
    if any(v.rows is not None for v in values[:2]):  # in an order that `sort_by_expert` has not made
        return [_lost(flow, eqn, values, v.aval.shape) for v in eqn.outvars]
    of_experts = [Value(None, _without_routed(v.mixing), v.scaled, v.sums) for v in values[:2]]
    of_tokens = [dataclasses.replace(v, mixing=_without_routed(v.mixing)) for v in values[2:]]
    return of_rows(flow, eqn, [*of_experts, *of_tokens])


@rule("bijax_pick_rows bijax_group_matmul bijax_quantize_picked bijax_quantized_groups")
def of_experts(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of operations on rows in the order of experts."""
    routed = frozenset().union(*(v.mixing for v in values))
    known = any(p.kind == "routed" for p in routed)
    has_rows = any(v.rows is not None for v in values)
    mixing = [flow.here(eqn, "order")] if has_rows and not known else []
    return [
        dataclasses.replace(found, mixing=found.mixing | set(mixing))
        for v in eqn.outvars
        for found in [_lost(flow, eqn, values, v.aval.shape)]
    ]


@rule("bijax_group_weight_gradient")
def group_weight_gradient(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns sums over the rows of each expert."""
    place = flow.here(eqn, "sum")
    return [
        dataclasses.replace(found, mixing=_without_routed(found.mixing), sums=found.sums | {place})
        for v in eqn.outvars
        for found in [_lost(flow, eqn, values, v.aval.shape)]
    ]


def _lost(flow: Flow, eqn: Any, values: list[Value], shape: tuple[int, ...]) -> Value:
    """Returns a result whose rows are in an order that no layout describes."""
    terms = [Value(None, v.mixing, v.scaled, v.sums) for v in values]
    return combined(terms, None, varies=everywhere(shape, flow.here(eqn, "position")))


def _without_routed(places: Places) -> frozenset[Place]:
    return frozenset(p for p in places if p.kind != "routed")
