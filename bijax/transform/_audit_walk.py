"""Every operation of a traced program, with those inside loops, branches and called functions."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from bijax.hlo._frames import user_line
from bijax.transform._tables import RECURSE

_MACHINERY = re.compile(r"/jax/|/bijax/")


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation.

    Attributes:
        name: Name of the primitive.
        operands: Abstract values of the operands.
        results: Abstract values of the results.
        parameters: Those of the primitive.
        metadata: Its tags.
        line: "FILE:LINE" of the user's program; empty if it is not known.
        runs: How often it runs in one run of the program. The body of a `while` counts once, and each branch of a
            `cond` as if it were taken.
    """

    name: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    parameters: dict[str, Any]
    metadata: dict[str, str]
    line: str
    runs: int


def equations(jaxpr: Any, runs: int = 1, outer_line: str = "") -> Iterator[Equation]:
    """Yields the operations that compute, in the order of the program, without those whose results nothing uses.

    Args:
        jaxpr: A jaxpr, closed or open.
        runs: How often it runs.
        outer_line: Line of the operation that holds it, for operations without a line of their own.
    """
    for eqn in _live(jaxpr):
        inner = list(_programs(eqn.params)) if eqn.primitive.name in RECURSE else []
        line = _line(eqn) or outer_line
        if not inner:
            yield Equation(
                name=eqn.primitive.name,
                operands=tuple(v.aval for v in eqn.invars),
                results=tuple(v.aval for v in eqn.outvars),
                parameters=eqn.params,
                metadata=dict(getattr(eqn.ctx, "xla_metadata", None) or {}),
                line=line,
                runs=runs,
            )
        trips = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        for program in inner:
            yield from equations(program, runs * trips, line)


def _live(jaxpr: Any) -> list[Any]:
    """Returns the equations that something uses; JAX lowers no others."""
    used = set(map(id, jaxpr.jaxpr.outvars if hasattr(jaxpr, "jaxpr") else jaxpr.outvars))
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(v) in used for v in eqn.outvars):
            used.update(map(id, eqn.invars))
            live.append(eqn)
    return live[::-1]


def _programs(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(entry, "eqns"):
                yield entry


def _line(eqn: Any) -> str:
    """Returns the user's line; where a library's module is audited by itself, the library's."""
    traceback = eqn.source_info.traceback
    stack = [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []
    return user_line(stack) or next((f"{file}:{line}" for file, line in stack if not _MACHINERY.search(file)), "")
