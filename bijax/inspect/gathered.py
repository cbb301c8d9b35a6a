"""The arrays that a program with sharded arguments gathers."""

import dataclasses
import math
from typing import Any, Final

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding

from bijax.core.tag import TAG
from bijax.transform.hook.arguments_cut import Cut
from bijax.transform.hook.cut_rows import gathering
from bijax.transform.hook.state import of_equation
from bijax.transform.rules.equations import line_of

_WHY: Final = "it needs whole arrays: the one that is cut is gathered, and every device computes all of it"


@dataclasses.dataclass(frozen=True)
class Gathered:
    """An array that is gathered when the program runs on several devices.

    Attributes:
        primitive: Name of the JAX primitive that needs it whole.
        shape: Its dtype and shape.
        line: "FILE:LINE" of the user's program; may be empty.
        count: Number of such operations on the line.
        why: Why it is gathered.
    """

    primitive: str
    shape: str
    line: str
    count: int = 1
    why: str = _WHY


def find_gathered(program: Any, arguments: Any, platform: str) -> tuple[Gathered, ...]:
    """Returns what the invariant operations of a program gather.

    Args:
        program: The traced program, a closed jaxpr.
        arguments: Its arguments; those that are no arrays with a `NamedSharding` are whole.
        platform: The target platform.
    """
    leaves = jax.tree.leaves(arguments)
    if len(leaves) != len(program.jaxpr.invars):  # static arguments, or a function that rearranges them
        return ()
    cuts = {v: cut for v, leaf in zip(program.jaxpr.invars, leaves, strict=True) if (cut := _cut(leaf)) is not None}
    if not cuts:
        return ()
    counts: dict[tuple[str, str, str], int] = {}
    for eqn, variable in gathering(program.jaxpr, platform, _is_meant, cuts):
        key = eqn.primitive.name, _short(variable), line_of(eqn)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Gathered(*key, count=count) for key, count in counts.items())


def _is_meant(eqn: Any) -> bool:
    metadata = eqn.ctx.xla_metadata or {}
    return TAG in metadata and of_equation(metadata).enabled


def _cut(leaf: Any) -> Cut | None:
    """Returns how an argument is cut along its first dimension that is; None if it is whole."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = tuple(sharding.mesh.shape.items())
    sizes = dict(mesh)
    for dimension, entry in enumerate(sharding.spec.partitions):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        count = math.prod(sizes[name] for name in names)
        if count > 1:
            return Cut(mesh, dimension, tuple(names), count)
    return None


def _short(variable: Var) -> str:
    return str(variable.aval.str_short(short_dtypes=True))
