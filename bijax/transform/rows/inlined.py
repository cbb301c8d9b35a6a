"""The equations of a program with those of the functions that it calls instead of the calls."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
from jax.extend.core import Literal, Var

from bijax.transform.rules.equations import line_of
from pallas_kernels.runtime.own_settings import without_mesh

IsMeant = Callable[[Any], bool]
"""Whether an equation should be made invariant."""

CALLS: Final = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
}
"""Operations that call a program, and the parameter that holds it."""


def inlined(eqns: Any, is_meant: IsMeant, names: Mapping[Any, Any], caller: Any = None) -> Iterator[Any]:
    """Yields equations under other names, and instead of calls of functions the equations of these.

    Args:
        eqns: The equations of a program.
        is_meant: Whether an equation should be made invariant.
        names: The new names of its variables; those that are missing keep theirs.
        caller: The call of the program. Its line is that of equations without one: JAX traces a function once for all
            its callers.
    """

    def renamed(v: Any) -> Any:
        return v if isinstance(v, Literal) else names.get(v, v)

    for given in eqns:
        eqn = given
        if caller is not None and not line_of(eqn):
            eqn = eqn.replace(source_info=caller.source_info)
        operands, results = [renamed(v) for v in eqn.invars], [renamed(v) for v in eqn.outvars]
        program = _called(eqn, is_meant)
        if program is None:
            yield eqn.replace(invars=operands, outvars=results)
            continue
        inner = dict(zip(program.invars, operands, strict=True))
        inner |= {v: Var(v.aval) for called in program.eqns for v in called.outvars}
        copied = []
        for v, result in zip(program.outvars, results, strict=True):
            if isinstance(v, Literal) or v in program.invars or inner[v] in results:
                copied.append((v, result))
            else:
                inner[v] = result
        yield from inlined(program.eqns, is_meant, inner, eqn)
        for v, result in copied:
            operand = v if isinstance(v, Literal) else inner[v]
            yield eqn.replace(
                primitive=jax.lax.copy_p, invars=[operand], outvars=[result], params={}, effects=frozenset()
            )


def _called(eqn: Any, is_meant: IsMeant) -> Any:
    """Returns the program of a function that an equation calls, if all of it should be made invariant."""
    key = CALLS.get(eqn.primitive.name)
    program = eqn.params.get(key) if key else None
    if program is None or program.consts or eqn.effects or eqn.ctx.compute_type is not None or not is_meant(eqn):
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(sharding is not _no_sharding() for sharding in shardings):
        return None
    return program.jaxpr if all(is_meant(inner) for inner in program.jaxpr.eqns) else None


@functools.cache
def _no_sharding() -> Any:
    """Returns what stands for the sharding of an argument of `jax.jit` for which none was given."""
    with without_mesh():
        (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).jaxpr.eqns
    return eqn.params["in_shardings"][0]
