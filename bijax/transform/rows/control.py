"""Rules of loops, branches and linear solves."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from bijax.core.explicit_axes import is_partial
from bijax.transform.rows.flow import Flow, rule, unknown
from bijax.transform.rows.layout import Layout, layout, moved
from bijax.transform.rows.value import Place, Value, axes_moved, chosen, combined, met_along
from bijax.transform.rules.equations import inner_programs

_ROUNDS: Final = 12
"""Rounds after which a loop is no longer followed; each adds at least one place or one array with rows."""


def met(flow: Flow, eqn: Any, first: Value, second: Value) -> Value:
    """Returns what is known of a value that is either of two: the results of two branches, or of two iterations."""
    rows, differ = chosen([first.rows, second.rows])
    if rows is None:
        return combined([first, second], None, varies=first.varies | second.varies)
    mixing = {flow.here(eqn, "meet")} if differ else set()
    for value in (first, second):
        mixing |= met_along(value, rows, flow.here(eqn, "position"))
    return combined([first, second], rows, mixing=mixing)


def decided(results: Sequence[Value], by: Value, place: Place) -> list[Value]:
    """Returns results whose computation was decided by a value: the number of iterations, the branch."""
    if not by.touched:
        return list(results)
    reasons = by.touched | {place}
    return [
        dataclasses.replace(v, mixing=v.mixing | reasons)
        if v.rows is not None
        else dataclasses.replace(v, mixing=v.mixing | by.mixing, sums=v.sums | by.sums | by.scaled)
        for v in results
    ]


@rule("cond", partly=True)
def cond(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of the branches."""
    which, operands = values[0], values[1:]
    branches = [flow.run(branch, operands) for branch in inner_programs(eqn, flow.platform)]
    results = branches[0]
    for other in branches[1:]:
        results = [met(flow, eqn, a, b) for a, b in zip(results, other, strict=True)]
    if which.rows is not None or which.varies:  # in a loop: another branch in another iteration
        results = [met(flow, eqn, v, which) for v in results]
    return decided(results, which, flow.here(eqn, "branch"))


@rule("while", partly=True)
def while_loop(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns what a loop carries.

    A condition with one element per row, as `jax.vmap` makes it, stops each row by itself.
    """
    params = eqn.params
    of_cond, of_body = values[: params["cond_nconsts"]], values[params["cond_nconsts"] :][: params["body_nconsts"]]
    carried = values[params["cond_nconsts"] + params["body_nconsts"] :]
    place = flow.here(eqn, "loop")
    for _ in range(_ROUNDS):
        (goes_on,) = flow.run(params["cond_jaxpr"], [*of_cond, *carried])
        after = flow.run(params["body_jaxpr"], [*of_body, *carried])
        joined = [met(flow, eqn, a, b) for a, b in zip(carried, after, strict=True)]
        joined = decided(joined, goes_on, place)
        if goes_on.rows is not None or goes_on.varies:
            # Each row keeps what it carried when its own condition ended the loop, counters too.
            joined = [met(flow, eqn, v, goes_on) for v in joined]
        if joined == carried:
            return carried
        carried = joined
    return unknown(flow, eqn, carried)


@rule("scan", partly=True)
def scan(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns what a loop over the first axis of arrays carries and collects.

    If the rows lie along that axis, an iteration has rows of its own; what it carries to the next is a sum over rows.
    """
    program = eqn.params["jaxpr"]
    constants, carried, arrays = scan_operands(eqn, values)
    with flow.new_axis() as axis:
        slices = [entered(v, axis) for v in arrays]

        def followed(changes: Sequence[bool]) -> list[Value] | None:
            return _followed(flow, eqn, constants, carried, slices, axis, changes)

        inside = getattr(program, "jaxpr", program)
        before = inside.invars[len(constants) : len(constants) + len(carried)]
        changes = [v is not w for v, w in zip(before, inside.outvars[: len(carried)], strict=True)]
        if any(v.rows is not None and axis in v.rows.axes for v in slices):  # sums over rows are reported as such
            first = followed([False] * len(carried)) or carried
            is_sum = [flow.here(eqn, "sum") in v.sums for v in first[: len(carried)]]
            changes = [change and not found for change, found in zip(changes, is_sum, strict=True)]
        return followed(changes) or unknown(flow, eqn, values)


def _followed(
    flow: Flow,
    eqn: Any,
    constants: list[Value],
    carried: list[Value],
    slices: list[Value],
    axis: int,
    changes: Sequence[bool],
) -> list[Value] | None:
    """Returns what a scan carries and collects; None if that is not found in a number of rounds.

    Args:
        flow: The flow.
        eqn: The equation.
        constants: What all iterations have.
        carried: What the first iteration is handed.
        slices: What each iteration has of the arrays.
        axis: The axis of the iterations.
        changes: Which of what is carried differs from iteration to iteration, and so varies along that axis.
    """
    carry, here = flow.here(eqn, "sum"), flow.here(eqn, "position")
    for _ in range(_ROUNDS):
        handed = [_varying(v, axis, here) if change else v for v, change in zip(carried, changes, strict=True)]
        results = flow.run(eqn.params["jaxpr"], [*constants, *handed, *slices])
        after = [_handed_on(v, axis, carry) for v in results[: len(carried)]]
        joined = [met(flow, eqn, a, b) for a, b in zip(carried, after, strict=True)]
        if joined == carried:
            # Sums over the rows before each row differ from row to row.
            collected = [_varying(v, axis, here) if carry in v.sums else v for v in results[len(carried) :]]
            return [*carried, *(_left(v, axis) for v in collected)]
        carried = joined
    return None


def scan_operands[T](eqn: Any, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns the constants, the values that are carried and the arrays of a scan."""
    params = eqn.params
    if "ft_in" in params:  # JAX 0.12: the three groups as one tree
        constants, carried, arrays = (list(group) for group in params["ft_in"].update(values).unpack())
        return constants, carried, arrays
    begin, end = int(params["num_consts"]), int(params["num_consts"] + params["num_carry"])
    return list(values[:begin]), list(values[begin:end]), list(values[end:])


def entered(value: Value, axis: int) -> Value:
    """Returns an array in one iteration: its first axis becomes an axis outside of arrays."""
    axes = {a: a - 1 for a in range(1, 64)} | {0: axis}
    rows = value.rows and moved(value.rows, axes)
    return Value(rows, value.mixing, value.scaled, value.sums, axes_moved(value, axes))


def _left(value: Value, axis: int) -> Value:
    """Returns what the iterations collect, stacked along a new first axis."""
    axes = {a: a + 1 for a in range(64)} | {axis: 0}
    rows = value.rows and moved(value.rows, axes)
    return Value(rows, value.mixing, value.scaled, value.sums, axes_moved(value, axes))


def _varying(value: Value, axis: int, here: Place) -> Value:
    """Returns what an iteration was handed: it differs from that of another iteration."""
    return dataclasses.replace(value, varies=value.varies | {(axis, here)}) if value.rows is None else value


def _handed_on(value: Value, axis: int, carry: Place) -> Value:
    """Returns what an iteration hands on to the next."""
    varies = frozenset((a, p) for a, p in value.varies if a != axis)
    if value.rows is None or axis not in value.rows.axes:
        return dataclasses.replace(value, varies=varies)
    # What was handed on to this row is a sum over rows before it; only what mixed earlier still counts as mixing.
    sums = frozenset({carry}) | value.sums | (value.mixing & {carry})
    return Value(None, value.mixing - {carry}, value.scaled, sums, varies)


@rule("custom_linear_solve", partly=True)
def linear_solve(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of the function that solves."""
    lengths = eqn.params["const_lengths"]
    before = 0
    for name in lengths._fields:
        if name == "solve":
            break
        before += getattr(lengths, name)
    constants = values[before : before + lengths.solve]
    return flow.run(eqn.params["jaxprs"].solve, [*constants, *values[sum(lengths) :]])


@rule("linear_call", partly=True)
def linear_call(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of the function."""
    (program,) = inner_programs(eqn, flow.platform)
    return flow.run(program, values)


@rule("debug_callback debug_print check inspect_sharding dce_sink shape_assertion unreachable after_all", partly=True)
def effect(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns nothing known: these compute nothing."""
    return [Value() for _ in eqn.outvars]


@rule("shard_map", partly=True)
def shard_map(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the results of a program that runs on each device of a mesh.

    The rows that a mesh divides have a factor on an axis outside of arrays, for the device. The numbers of these axes
    are those of loops; a collective over such an axis adds rows.
    """
    params = eqn.params
    sizes = dict(params["mesh"].shape)
    if any(is_partial(specs, gradients=True) for specs in (*params["in_specs"], *params["out_specs"])):
        return unknown(flow, eqn, values)
    with flow.mesh(sizes) as axes:
        inside = []
        for value, specs in zip(values, params["in_specs"], strict=True):
            found = _divided(value, specs, axes, sizes)
            if found is None:
                return unknown(flow, eqn, values)
            inside.append(found)
        results = flow.run(params["jaxpr"], inside)
        pairs = zip(results, params["out_specs"], params["jaxpr"].outvars, strict=True)
        return [_assembled(flow, eqn, value, specs, axes, v.aval.shape) for value, specs, v in pairs]


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _divided(value: Value, specs: Any, axes: dict[str, int], sizes: dict[str, int]) -> Value | None:
    rows, varies = value.rows, set(value.varies)
    for dim, entry in enumerate(specs):
        for name in _names(entry):
            if sizes[name] == 1:
                continue
            varies |= {(axes[name], p) for a, p in value.varies if a == dim}
            found = rows.on(dim) if rows is not None else ()
            if rows is None or not found:
                continue
            f = found[0]
            if len(found) > 1 or f.outer > 1 or f.size % sizes[name]:
                return None
            local = f.size // sizes[name]
            others = [g for g in rows.factors if g != f]
            device = dataclasses.replace(f, axis=axes[name], size=sizes[name], stride=1, weight=f.weight * local)
            rows = layout([*others, device, dataclasses.replace(f, size=local)], rows.first)
    return Value(rows, value.mixing, value.scaled, value.sums, frozenset(varies))


def _assembled(flow: Flow, eqn: Any, value: Value, specs: Any, axes: dict[str, int], shape: tuple[int, ...]) -> Value:
    places: dict[int, int] = {}
    factors = list(value.rows.factors) if value.rows is not None else []
    varies = set(value.varies)
    for dim, entry in enumerate(specs):
        length = shape[dim]
        for name in reversed(_names(entry)):
            places[axes[name]] = dim
            factors = [dataclasses.replace(f, axis=dim, stride=length) if f.axis == axes[name] else f for f in factors]
            varies |= {(dim, p) for a, p in value.varies if a == axes[name]}
            length *= next((f.size for f in factors if f.axis == dim and f.stride == length), 1)
    meshes = set(axes.values())
    varies = {(a, p) for a, p in varies if a not in meshes}
    if value.rows is None:
        return Value(None, value.mixing, value.scaled, value.sums, frozenset(varies))
    if any(f.axis in meshes for f in factors):
        return Value(None, value.mixing | {flow.here(eqn, "unknown")}, value.scaled, value.sums, frozenset(varies))
    rows: Layout = layout(factors, value.rows.first)
    return Value(rows, value.mixing, value.scaled)


@rule("psum psum_invariant pmax pmin", partly=True)
def over_devices(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns sums over the devices of a mesh."""
    names = eqn.params.get("axes", ())
    axes = {flow.meshes[name] for name in names if name in flow.meshes}
    results = []
    for value in values:
        varies = frozenset((a, p) for a, p in value.varies if a not in axes)
        if value.rows is None or not value.rows.axes & axes:
            results.append(dataclasses.replace(value, varies=varies))
        elif value.rows.axes - axes:
            mixing = value.mixing | {flow.here(eqn, "meet")}
            results.append(Value(None, mixing, value.scaled, value.sums, varies))
        else:
            results.append(Value(None, value.mixing, value.scaled, value.sums | {flow.here(eqn, "sum")}, varies))
    return results


@rule("axis_index", partly=True)
def axis_index(flow: Flow, eqn: Any, values: list[Value]) -> Sequence[Value]:
    """Returns the number of the device, which varies along the axis of the mesh."""
    name = eqn.params.get("axis_name")
    axes = {flow.meshes[n] for n in _names(name) if n in flow.meshes}
    return [Value(varies=frozenset((a, flow.here(eqn, "position")) for a in axes))]
