"""Replicates the values of invariant operations in a program that XLA partitions.

Marks are placed where values enter and leave the operations (`bijax.core.partitioning`). Sharded types (explicit
meshes) end there too: JAX's rules would shard their results by them.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
from jax.extend.core import Literal, Var

from bijax.core.explicit_axes import is_partial
from bijax.core.partitioning import WHOLE
from bijax.transform.errors import NotInvariantError
from bijax.transform.rules._refused import REFUSED
from bijax.transform.rules.equations import line_of
from bijax.transform.rules.names import PARTIAL, rule_name

UNMARKED: Final = frozenset(
    {
        *("bijax_retyped", "custom_partitioning", "device_put", "jit", "mesh_cast", "optimization_barrier", "pmap"),
        *("reshard", "shard_map", "sharding_constraint"),
    }
)
"""Operations that define shardings, that hold programs whose arguments and results have explicit shardings, or that
compute nothing: the barriers around a function would gather the arguments of a `jax.shard_map` inside."""

_ADDING: Final = frozenset({"reshard", "sharding_constraint"})
"""Those of them that may add the parts of an unreduced value."""


def with_whole_values(jaxpr: Any, is_meant: Callable[[Any], bool], refused: str = "") -> Any:
    """Returns a program for lowering with partitioning by XLA.

    Args:
        jaxpr: The program.
        is_meant: Whether an equation should be made invariant.
        refused: Why no value can be marked, if none can.

    Raises:
        NotInvariantError: If an equation should be made invariant and no value can be marked, or it has partial sums.
    """
    for eqn in jaxpr.eqns:
        if is_meant(eqn) and (eqn.primitive.name in _ADDING or eqn.primitive.name not in UNMARKED):
            _check_types(eqn)
    meant = [is_meant(eqn) and eqn.primitive.name not in UNMARKED for eqn in jaxpr.eqns]
    if not any(meant):
        return jaxpr
    if refused:
        eqn = jaxpr.eqns[meant.index(True)]
        raise NotInvariantError(eqn.primitive.name, eqn.primitive.name, refused)
    others = [eqn for eqn, chosen in zip(jaxpr.eqns, meant, strict=True) if not chosen]
    elsewhere = {v for eqn in others for v in eqn.invars if isinstance(v, Var)}
    elsewhere |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    marked: dict[Var, Var] = {}  # replacements of variables that invariant operations read
    equations = []
    for eqn, chosen in zip(jaxpr.eqns, meant, strict=True):
        if not chosen:
            equations.append(eqn)
            continue
        for v in eqn.invars:
            if not isinstance(v, Literal) and v not in marked and _is_array(v):
                marked[v] = Var(_untyped(v.aval))
                equations.append(_marking(eqn, v, marked[v]))
        invars = [v if isinstance(v, Literal) else marked.get(v, v) for v in eqn.invars]
        outvars, leaving = [], []
        for v in eqn.outvars:
            if _is_array(v) and (v in elsewhere or _is_typed(v.aval)):
                marked[v] = Var(_untyped(v.aval))
                outvars.append(marked[v])
                if v in elsewhere:
                    leaving.append(_marking(eqn, marked[v], v))
            else:
                marked[v] = v
                outvars.append(v)
        equations += [eqn.replace(invars=invars, outvars=outvars), *leaving]
    return jaxpr.replace(eqns=equations)


def _check_types(eqn: Any) -> None:
    """Refuses an operation on partial sums: as a value that is whole, each device's part would count as the sum."""
    name, operands = eqn.primitive.name, [v.aval for v in eqn.invars]
    results = (getattr(v.aval, "sharding", None) for v in eqn.outvars)
    if rule_name(name, eqn.params, operands) == PARTIAL or any(map(is_partial, results)):
        described = f"{name}({', '.join(map(str, operands))})"
        raise NotInvariantError(name, described, REFUSED[PARTIAL], line_of(eqn), may_be_allowed=False)


def has_typed_values(jaxpr: Any) -> bool:
    """Returns whether JAX marks some value of a program with its type, also where XLA has nothing to partition."""
    return any(_is_array(v) and _is_typed(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)


def _is_array(v: Any) -> bool:
    return isinstance(v.aval, jax.core.ShapedArray)


def _is_typed(aval: Any) -> bool:
    """Returns whether JAX marks values with their type; XLA then rounds 16-bit numbers that it does not elsewhere."""
    mesh = aval.sharding.mesh
    return not (mesh.empty or mesh.are_all_axes_auto or mesh.are_all_axes_manual)


def _untyped(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) if _is_typed(aval) else aval


def _marking(eqn: Any, value: Var, marked: Var) -> Any:
    return eqn.replace(primitive=WHOLE, invars=[value], outvars=[marked], params={}, effects=frozenset())
