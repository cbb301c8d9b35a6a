"""Every operation of a traced program, including those inside loops, branches and called functions."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from bijax.core.tag import TAG
from bijax.hlo._frames import user_line
from bijax.transform.hook.callbacks import is_conditional
from bijax.transform.hook.entered import programs_of
from bijax.transform.rules.names import rule_name
from bijax.transform.rules.regions import IN_REGIONS, TAKEN_OUT
from bijax.transform.rules.registry import is_known, is_program

_MACHINERY = re.compile(r"/jax/|/bijax/")


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation.

    Attributes:
        name: Name of the primitive.
        operands: Abstract values of the operands.
        results: Abstract values of the results.
        parameters: Parameters of the primitive.
        metadata: Its tags, or those of the enclosing operation if it has none.
        line: "FILE:LINE" of the user's program; empty if unknown.
        runs: Number of its runs in one run of the program. The body of a `while` counts once, and each branch of a
            `cond` as taken, except those of other platforms. The function of a scatter or a reduction runs
            once for each element.
        conditional: Whether it runs under a computed condition.
        by_itself: For a primitive without a rule, names of the instructions that its lowering emits outside JAX code.
    """

    name: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    parameters: dict[str, Any]
    metadata: dict[str, str]
    line: str
    runs: int
    conditional: bool = False
    by_itself: tuple[str, ...] = ()


def equations(
    jaxpr: Any,
    platform: str,
    runs: int = 1,
    outer_line: str = "",
    outer_tags: Mapping[str, str] = MappingProxyType({}),
    conditional: bool = False,
) -> Iterator[Equation]:
    """Yields the operations that compute, in the order of the program, without those whose results are unused.

    Args:
        jaxpr: A jaxpr, closed or open.
        platform: The target platform, which selects among branches for several platforms.
        runs: Number of its runs.
        outer_line: Line of the enclosing operation, for operations without a line.
        outer_tags: Its tags, for operations traced without one.
        conditional: Whether it runs under a computed condition.
    """
    for eqn in live(jaxpr):
        name = eqn.primitive.name
        inner = list(inner_programs(eqn, platform)) if is_program(name) else []
        entered = None if is_known(name) else programs_of(eqn, platform)
        stack = _stack(eqn)
        line = user_line(stack) or outer_line or _library_line(stack)
        tags = dict(getattr(eqn.ctx, "xla_metadata", None) or {})
        tags = tags if TAG in tags else {**tags, **outer_tags}
        if entered:
            inner = list(entered.jaxprs)
        if entered.by_itself if entered else not inner:
            yield Equation(
                name=name,
                operands=tuple(v.aval for v in eqn.invars),
                results=tuple(v.aval for v in eqn.outvars),
                parameters=eqn.params,
                metadata=tags,
                line=line,
                runs=runs,
                conditional=conditional,
                by_itself=entered.by_itself if entered else (),
            )
        trips = int(eqn.params["length"]) if name == "scan" else 1
        if (operation := rule_name(name, eqn.params)) in TAKEN_OUT:
            inner = [eqn.params[key] for key in IN_REGIONS[operation]]
            trips = _elements(eqn, operation)
        for program in inner:
            under = conditional or is_conditional(name, eqn.params)
            yield from equations(program, platform, runs * trips, line, tags, under)


def live(jaxpr: Any) -> list[Any]:
    """Returns the equations whose results are used; JAX lowers no others."""
    used = set(map(id, jaxpr.jaxpr.outvars if hasattr(jaxpr, "jaxpr") else jaxpr.outvars))
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(v) in used for v in eqn.outvars):
            used.update(map(id, eqn.invars))
            live.append(eqn)
    return live[::-1]


def inner_programs(eqn: Any, platform: str) -> Iterator[Any]:
    """Yields the programs that run; those that only a derivative would run are excluded."""
    parameters = eqn.params
    match eqn.primitive.name:
        case "custom_linear_solve":
            parameters = {"solve": parameters["jaxprs"].solve}
        case "linear_call":
            parameters = {"callee": parameters["callee"]}
        case "cond" if platforms := parameters.get("branches_platforms"):
            parameters = {"branches": _of_platform(parameters["branches"], platforms, platform)}
    for value in parameters.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(entry, "eqns"):
                yield entry


def _elements(eqn: Any, name: str) -> int:
    """Returns the number of elements that an operation applies its function to."""
    array = {"scatter_apply": eqn.invars[-1], "reduce_window": eqn.outvars[0]}.get(name, eqn.invars[0])
    numbers = (*array.aval.shape, *eqn.params.get("window_dimensions", ()))
    return math.prod(numbers) if all(isinstance(n, int) for n in numbers) else 1


def _of_platform(branches: tuple[Any, ...], platforms: tuple[tuple[str, ...] | None, ...], platform: str) -> Any:
    """Returns the branch of a platform, or else the default; all if neither exists, which JAX will not lower."""
    for own in (True, False):
        for branch, names in zip(branches, platforms, strict=True):
            if (names is not None and platform in names) if own else names is None:
                return branch
    return branches


def line_of(eqn: Any) -> str:
    """Returns "FILE:LINE" of the user's program that requests an equation; empty if unknown."""
    return user_line(_stack(eqn))


def _stack(eqn: Any) -> list[tuple[str, int]]:
    """Returns the files and lines of an equation, innermost first."""
    traceback = eqn.source_info.traceback
    return [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []


def _library_line(stack: list[tuple[str, int]]) -> str:
    """Returns the line of a library that is audited on its own."""
    return next((f"{file}:{line}" for file, line in stack if not _MACHINERY.search(file)), "")
