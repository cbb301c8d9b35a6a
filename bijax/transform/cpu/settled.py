"""Keeps reshapes of sums and maxima in place on a CPU.

`keepdims` is a reduction and a reshape. XLA moves a reshape past the operations that use it, one in each run of its
passes over the whole program, until nothing changes; a fenced product is four operations. A barrier after the reshape
prevents that. The reduced value has been computed before, so the barrier costs no pass over memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax.extend.core import Literal, Primitive

from pallas_kernels.parts.xla.tiles import isolate

_REDUCTIONS: Final = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
_RESHAPES: Final = frozenset({"broadcast_in_dim", "reshape"})

SETTLED: Final = Primitive("bijax_settled")
"""Replaces a reshape by one with a barrier after it in a program being lowered."""


def with_settled_reshapes(equations: Sequence[Any], old: Sequence[Any], plain: Callable[[Any], bool]) -> list[Any]:
    """Returns the equations of a program for lowering on a CPU.

    Args:
        equations: The equations, with those under a request already replaced.
        old: The original equations.
        plain: Whether a value has no sharding.
    """
    reduced: set[Any] = set()
    found = []
    for new, was in zip(equations, old, strict=True):
        name = new.primitive.name
        if name in _REDUCTIONS and new is not was:
            reduced.update(new.outvars)
        elif name in _RESHAPES and _only_reshapes(new) and new.invars[0] in reduced and plain(new.outvars[0].aval):
            new = new.replace(primitive=SETTLED, params={"shape": new.outvars[0].aval.shape})
        found.append(new)
    return found


def _only_reshapes(eqn: Any) -> bool:
    if len(eqn.invars) != 1 or isinstance(eqn.invars[0], Literal):
        return False
    given, (out,) = eqn.invars[0].aval, eqn.outvars
    return bool(given.size == out.aval.size and eqn.params.get("sharding") is None and out.aval.ndim)


def settled(x: jax.Array, *, shape: Sequence[int]) -> jax.Array:
    """Computes `SETTLED`."""
    return isolate(x.reshape(shape))[0]
