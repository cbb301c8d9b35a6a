"""Runs over the equations of a program with what is known of each value."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from bijax.transform.hook.entered import programs_of
from bijax.transform.rows.value import Kind, Place, Value, combined, everywhere, met_along
from bijax.transform.rules.equations import inner_programs, line_of, live
from bijax.transform.rules.registry import is_known

Rule = Callable[["Flow", Any, list[Value]], Sequence[Value]]
"""A rule: maps the flow, an equation and the values of its operands to the values of its results."""

RULES: Final[dict[str, Rule]] = {}
"""The rules, by the name of the primitive."""

_PARTLY: Final[set[str]] = set()
"""Primitives with results that do not depend on all operands."""

_SMALL: Final = 1 << 16
"""Elements of the largest constant array that is looked at."""


def rule(names: str, *, partly: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives.

    Args:
        names: Their names, separated by spaces.
        partly: Whether some results do not depend on all operands, such as those of programs.
    """

    def registered(function: Rule) -> Rule:
        _PARTLY.update(names.split() if partly else ())
        for name in names.split():
            if name in RULES:
                raise ValueError(f"expected one rule of {name}, got a second.")
            RULES[name] = function
        return function

    return registered


@dataclasses.dataclass
class Flow:
    """The state of one run.

    Attributes:
        platform: The target platform, which selects among branches for several platforms.
        line: Line of the enclosing operation.
        loops: Number of enclosing loops and axes of meshes, which number the axes outside of arrays.
        meshes: Those numbers of the axes of meshes, by name.
    """

    platform: str
    line: str = ""
    loops: int = 0
    meshes: dict[str, int] = dataclasses.field(default_factory=dict)

    def here(self, eqn: Any, kind: Kind) -> Place:
        """Returns the place of an equation."""
        return Place(kind, eqn.primitive.name, line_of(eqn) or self.line)

    def run(self, program: Any, values: Sequence[Value]) -> list[Value]:
        """Returns the values of a program's results.

        Args:
            program: A jaxpr, closed or open.
            values: The values of its arguments.
        """
        jaxpr = getattr(program, "jaxpr", program)
        known = self.values(program, values)
        return [constant(atom.val) if hasattr(atom, "val") else known[atom] for atom in jaxpr.outvars]

    def values(self, program: Any, values: Sequence[Value]) -> dict[Any, Value]:
        """Returns the values of all variables of a program that its results depend on.

        Args:
            program: A jaxpr, closed or open.
            values: The values of its arguments.
        """
        jaxpr = getattr(program, "jaxpr", program)
        known: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        known |= {v: constant(c) for v, c in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False)}
        for variable in jaxpr.constvars:
            known.setdefault(variable, unknown_array(variable.aval))

        def read(atom: Any) -> Value:
            return constant(atom.val) if hasattr(atom, "val") else known[atom]

        for eqn in live(jaxpr):
            operands = [read(atom) for atom in eqn.invars]
            for variable, value in zip(eqn.outvars, self._results(eqn, operands), strict=True):
                known[variable] = value
        return known

    def _results(self, eqn: Any, operands: list[Value]) -> Sequence[Value]:
        with self.inside(eqn):
            if found := RULES.get(eqn.primitive.name):
                results = found(self, eqn, operands)
                if eqn.primitive.name in _PARTLY:
                    return results
                return [self._checked(eqn, operands, *pair) for pair in zip(eqn.outvars, results, strict=True)]
            for program in self._programs(eqn):
                jaxpr = getattr(program, "jaxpr", program)
                if len(jaxpr.invars) == len(operands) and len(jaxpr.outvars) == len(eqn.outvars):
                    return self.run(program, operands)
            return unknown(self, eqn, operands)

    def _checked(self, eqn: Any, operands: list[Value], variable: Any, result: Value) -> Value:
        """Returns a result that depends on all operands, with what they depend on outside of arrays.

        A rule looks at the axes of arrays. In a loop a number may belong to a row, or vary, along the axis of the loop.
        """
        here, shared = self.here(eqn, "position"), [v for v in operands if v.rows is None]
        outside = Value(varies=frozenset((a, p) for v in shared for a, p in v.varies if a < 0))
        if result.rows is not None:
            own = {f for v in operands if v.rows is not None for f in v.rows.factors if f.axis < 0}
            mixing = met_along(outside, result.rows, here)
            if not own <= set(result.rows.factors):
                mixing.add(self.here(eqn, "meet"))
            return dataclasses.replace(result, mixing=result.mixing | mixing) if mixing else result
        known = {(p.primitive, p.line) for p in result.touched} | {(p.kind, "") for p in result.mixing}
        if len(shared) < len(operands) and not known & {(here.primitive, here.line), ("routed", "")}:
            return unknown(self, eqn, operands)[eqn.outvars.index(variable)]
        return dataclasses.replace(result, varies=result.varies | outside.varies) if outside.varies else result

    def _programs(self, eqn: Any) -> Iterator[Any]:
        """Yields the programs of an equation that may be all that it computes."""
        found = list(inner_programs(eqn, self.platform))
        if not found and not is_known(eqn.primitive.name) and (entered := programs_of(eqn, self.platform)):
            found = [] if entered.by_itself else list(entered.jaxprs)
        if len(found) == 1:
            yield found[0]

    @contextlib.contextmanager
    def inside(self, eqn: Any) -> Iterator[None]:
        """Makes an equation the enclosing one."""
        outer = self.line
        self.line = line_of(eqn) or outer
        try:
            yield
        finally:
            self.line = outer

    @contextlib.contextmanager
    def new_axis(self) -> Iterator[int]:
        """Gives the number of an axis outside arrays, for a loop."""
        self.loops += 1
        try:
            yield -self.loops
        finally:
            self.loops -= 1

    @contextlib.contextmanager
    def mesh(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Gives the numbers of the axes of a mesh."""
        outer, before = self.meshes, self.loops
        axes = {name: -(self.loops + 1 + n) for n, name in enumerate(sizes)}
        self.meshes, self.loops = {**outer, **axes}, self.loops + len(axes)
        try:
            yield axes
        finally:
            self.meshes, self.loops = outer, before


_CONSTANT: Final = Place("position", "constant", "")


def unknown(flow: Flow, eqn: Any, operands: list[Value]) -> list[Value]:
    """Returns the results of an operation of which nothing is known."""
    has_rows = any(v.rows is not None for v in operands)
    place = flow.here(eqn, "unknown")
    return [
        combined(
            [Value(None, v.mixing, v.scaled, v.sums) for v in operands],
            None,
            varies=everywhere(v.aval.shape, flow.here(eqn, "position")) if hasattr(v.aval, "shape") else (),
            mixing=[place] if has_rows else [],
        )
        for v in eqn.outvars
    ]


def constant(array: Any) -> Value:
    """Returns the value of a constant; small ones are looked at."""
    shape = np.shape(array)
    if math.prod(shape) > _SMALL:
        return unknown_array(array)
    try:
        known = np.asarray(array)
    except (TypeError, ValueError, RuntimeError):  # a tracer, keys of random numbers, an array that was deleted
        return unknown_array(array)
    bits = np.ascontiguousarray(known)[..., None].view(np.uint8)  # zeros of both signs differ
    varies = {axis for axis in range(known.ndim) if (bits != bits.take([0], axis)).any()} if known.size else set()
    exact = np.issubdtype(known.dtype, np.integer) or known.dtype == bool
    return Value(varies=frozenset((axis, _CONSTANT) for axis in varies), known=known if exact else None)


def unknown_array(aval: Any) -> Value:
    """Returns the value of an array without rows, of which the shape alone is known."""
    return Value(varies=everywhere(getattr(aval, "shape", ()), _CONSTANT))
