"""Rearranges the equations of a program: inlining jitted functions, dead code elimination, ordering."""

import heapq
from collections.abc import Sequence
from typing import Any, Final

from jax.extend.core import DropVar, Var

from bijax.core.tag import TAG
from bijax.transform.fusion._kinds import is_variable
from bijax.transform.fusion._regions import MASKING, NAMES

Equation = Any

INLINED: Final = MASKING | NAMES | {"log", "gather", "scatter-add"}
"""Operations of jitted functions that are inlined: `jnp.where`, `jax.nn.log_softmax`, `jnp.take_along_axis`."""

_MOST_INLINED: Final = 16


def inlined(equations: Sequence[Equation]) -> list[Equation]:
    """Returns equations with short jitted functions inlined."""
    found: list[Equation] = []
    for eqn in equations:
        body = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if body is None or len(body.jaxpr.eqns) > _MOST_INLINED:
            found.append(eqn)
            continue
        steps = inlined(body.jaxpr.eqns)
        if not _may_stand_out(body, steps):
            found.append(eqn)
            continue
        names: dict[Any, Any] = dict(zip(body.jaxpr.invars, eqn.invars, strict=True))
        results = zip(body.jaxpr.outvars, eqn.outvars, strict=True)
        outer = {inner: out for inner, out in results if not isinstance(out, DropVar)}
        for step in steps:
            outvars = [outer.get(v) or Var(v.aval) for v in step.outvars]
            invars = [v if not is_variable(v) else names[v] for v in step.invars]
            # Equations traced elsewhere carry no tag, and take that of the call.
            ctx = step.ctx if step.ctx.xla_metadata else eqn.ctx
            found.append(step.replace(invars=invars, outvars=outvars, ctx=ctx))
            names |= dict(zip(step.outvars, outvars, strict=True))
    return found


def _may_stand_out(body: Any, steps: Sequence[Equation]) -> bool:
    """Returns whether a body with the equations `steps` may be inlined."""
    made = {v for e in steps for v in e.outvars}
    results = body.jaxpr.outvars
    return (
        not body.consts
        and len(steps) <= _MOST_INLINED
        and all(e.primitive.name in INLINED for e in steps)
        # An equation with only other metadata takes the request of the call, which its metadata would hide.
        and all(not e.ctx.xla_metadata or TAG in e.ctx.xla_metadata for e in steps)
        and all(is_variable(v) and v in made for v in results)
        and len({*results}) == len(results)
    )


def needed(equations: Sequence[Equation], outvars: Sequence[Any]) -> list[Equation]:
    """Returns the equations without those whose results nothing uses, which would count as uses of other results."""
    used, found = {v for v in outvars if is_variable(v)}, []
    for eqn in reversed(equations):
        if eqn.effects or any(v in used for v in eqn.outvars):
            used |= {v for v in eqn.invars if is_variable(v)}
            found.append(eqn)
    return found[::-1]


def in_order(equations: Sequence[tuple[int, Equation]]) -> list[Equation]:
    """Returns equations, each after those whose results it takes, otherwise in the order of their numbers."""
    ordered = sorted(equations, key=lambda pair: pair[0])
    maker = {v: i for i, (_, e) in enumerate(ordered) for v in e.outvars}
    readers: list[set[int]] = [set() for _ in ordered]
    waits = [0] * len(ordered)
    last_effect = None
    for i, (_, eqn) in enumerate(ordered):
        before = {maker[v] for v in eqn.invars if is_variable(v) and v in maker}
        if eqn.effects:
            before |= set() if last_effect is None else {last_effect}
            last_effect = i
        waits[i] = len(before)
        for j in before:
            readers[j].add(i)
    ready = [i for i, count in enumerate(waits) if not count]
    found = []
    while ready:
        i = heapq.heappop(ready)
        found.append(ordered[i][1])
        for j in readers[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, j)
    return found
