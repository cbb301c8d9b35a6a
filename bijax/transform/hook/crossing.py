"""The boundary between invariant equations and plain ones in a program that is lowered.

XLA:CPU contracts a product and a sum into one instruction with one rounding where it finds both in a loop. A product
that plain code computes must not be contracted with a sum that is invariant: the sum would depend on more than its
operands. Equations show where values enter, no matter how the function got them: as arguments, inside a container, or
from a closure.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.interpreters.mlir import ir

_BARRIER: Final = jax.lax.optimization_barrier_p


def with_barriers(jaxpr: Any, equations: Sequence[Any], is_meant: Callable[[Any], bool], enabled: bool) -> list[Any]:
    """Returns the equations for lowering, with barriers where plain values enter invariant equations.

    Args:
        jaxpr: The program as it was traced.
        equations: Its equations as they will be lowered, in the same order and number.
        is_meant: Whether an equation of the traced program should be made invariant.
        enabled: Whether the program as a whole is inside an invariant one, which has barriers around its arguments.
    """
    meant = [is_meant(eqn) for eqn in jaxpr.eqns]
    if not any(meant):
        return list(equations)
    plain = {v for eqn, chosen in zip(jaxpr.eqns, meant, strict=True) if not chosen for v in eqn.outvars}
    if not enabled and not _is_whole_program():
        plain |= {*jaxpr.constvars, *jaxpr.invars}
    inside: dict[Var, Var] = {}
    result: list[Any] = []
    for eqn, chosen in zip(equations, meant, strict=True):
        if not chosen or eqn.primitive.name == _BARRIER.name:
            result.append(eqn)
            continue
        for v in eqn.invars:
            if isinstance(v, Var) and v in plain and v not in inside and _is_inexact(v):
                inside[v] = Var(v.aval)
                result.append(
                    eqn.replace(primitive=_BARRIER, invars=[v], outvars=[inside[v]], params={}, effects=frozenset())
                )
        result.append(eqn.replace(invars=[inside.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]))
    return result


def _is_inexact(v: Var) -> bool:
    return isinstance(v.aval, jax.core.ShapedArray) and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _is_whole_program() -> bool:
    """Returns whether the program that is lowered now is the module's own, whose arguments nothing computes."""
    owner: Any = ir.InsertionPoint.current.block.owner
    return "sym_name" in owner.attributes and ir.StringAttr(owner.attributes["sym_name"]).value == "main"
