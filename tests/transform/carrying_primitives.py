"""Every primitive of the installed JAX that is given a program, found by the names of what its rules take."""

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from jax._src import custom_partitioning as custom_partitioning
from jax._src.interpreters import ad, mlir

_PROGRAM = re.compile(
    r"jaxprs?$|jaxpr_thunk$|^(branches|call|callable|callback|callee|computation|exported)$|_callable$"
)


def carrying_primitives() -> set[str]:
    """Returns the names of the primitives that can be lowered and have a parameter which holds a program."""
    rules: dict[Any, list[Any]] = {}
    for table in (mlir._lowerings, *mlir._platform_specific_lowerings.values()):
        for primitive, entry in table.items():
            rules.setdefault(primitive, []).append(entry.rule)
    return {p.name for p, own in rules.items() if any(map(_PROGRAM.search, _parameters(p, own)))}


def _parameters(primitive: Any, rules: list[Any]) -> set[str]:
    functions = [*rules, primitive.impl, primitive.abstract_eval, ad.primitive_jvps.get(primitive)]
    return {name for function in functions for name in _names(function, 0)}


def _names(function: Any, depth: int) -> Iterator[str]:
    """Yields the parameters of a function, and of those that it calls where it only hands parameters on."""
    if depth > 3 or function is None:
        return
    if isinstance(function, functools.partial):
        for inner in (function.func, *function.args, *function.keywords.values()):
            if callable(inner):
                yield from _names(inner, depth + 1)
        return
    function = inspect.unwrap(function)
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents):
            yield from _names(cell.cell_contents, depth + 1)
    try:
        yield from inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
