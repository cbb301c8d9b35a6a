"""Prevents constant folding for CPUs where subnormal numbers may be involved.

XLA folds operations on constants at compile time and keeps subnormal numbers, which CPU instructions flush to zero.
Whether it does so may depend on the batch: a constant that is repeated for one row is a constant, and one that is
repeated for many is not. So an operand is hidden from XLA, unless neither it nor the result can be subnormal: for that,
the magnitudes of constants are followed through the program, and through the programs that it calls.

XLA leaves out the addition of a constant zero, with which -0 becomes +0 and subnormal numbers zeros. A zero that a loop
adds to in its first iteration is constant if there is no second one. So zeros that are added are hidden.

Up to JAX 0.11, XLA also makes x + (a + b) of (x + a) + b for constants a and b, and again sees constants only where
they are repeated for one row. There constants that are added are hidden too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, Var
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.transform.cpu import fences, spreads
from bijax.transform.cpu.spreads import (
    MOVING,
    OF_INTEGERS,
    SUMS,
    Constant,
    Known,
    added,
    floats,
    limit,
    of_literal,
    spread_of,
)
from bijax.transform.hook._jax_private import lower_per_platform
from bijax.transform.rows.control import scan_operands
from bijax.transform.rules.registry import is_program

_OF_ARRAYS: Final = 50.0
"""Spread of constant arrays; one that exceeds it is hidden, and one that is zero."""

_READ: Final = frozenset(["bfloat16", "float16", "float32", "float64"])  # element types of inspected constants


class _Found(NamedTuple):
    """The analysis of a program.

    Attributes:
        results: Its results.
        hidden: Equations and their operands to hide.
        arguments: Indices of arguments to hide.
        used: Arguments and constant arrays that are used.
    """

    results: list[Known]
    hidden: dict[int, list[int]]
    arguments: set[int]
    used: set[Any]


def with_hidden_constants(jaxpr: Any, is_meant: Callable[[Any], bool]) -> Any:
    """Returns a program for lowering on a CPU.

    Args:
        jaxpr: The program.
        is_meant: Whether an equation should be made invariant.
    """
    if not any(_concerns(eqn, is_meant) for eqn in jaxpr.eqns):
        return jaxpr
    found = _look(jaxpr, [None] * len(jaxpr.invars), is_meant)
    arrays = {v: Var(v.aval) for v in jaxpr.constvars if v in found.used and limit(v.aval)}
    if not found.hidden and not arrays:
        return jaxpr
    equations = []
    for number, eqn in enumerate(jaxpr.eqns):
        if not number:
            equations += [_hiding(_HELD, eqn, old, new) for old, new in arrays.items()]
        invars = [x if isinstance(x, Literal) else arrays.get(x, x) for x in eqn.invars]
        for place in found.hidden.get(number, ()):
            hidden = Var(invars[place].aval)
            equations.append(_hiding(_HIDDEN, eqn, invars[place], hidden))
            invars[place] = hidden
        same = all(new is old for new, old in zip(invars, eqn.invars, strict=True))
        equations.append(eqn if same else eqn.replace(invars=invars))
    return jaxpr.replace(eqns=equations)


def _concerns(eqn: Any, is_meant: Callable[[Any], bool]) -> bool:
    """Returns whether an equation should be made invariant, or holds one that should."""
    if is_meant(eqn):
        return True
    programs = (getattr(program, "jaxpr", program) for program, _ in _programs(eqn))
    return is_program(eqn.primitive.name) and any(_concerns(e, is_meant) for p in programs for e in p.eqns)


def _hiding(primitive: Primitive, eqn: Any, constant: Any, hidden: Var) -> Any:
    return eqn.replace(primitive=primitive, invars=[constant], outvars=[hidden], params={}, effects=frozenset())


def _look(jaxpr: Any, arguments: Sequence[Known], is_meant: Callable[[Any], bool]) -> _Found:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values: dict[Any, Known] = {
        v: None if known is None else known._replace(arguments=frozenset([i]))
        for i, (v, known) in enumerate(zip(jaxpr.invars, arguments, strict=True))
    }
    values |= {
        v: Constant(_OF_ARRAYS if limit(v.aval) else OF_INTEGERS, frozenset([v]), spreads.SOME) for v in jaxpr.constvars
    }
    found = _Found([], {}, set(), set())

    def known(atom: Any) -> Known:
        return of_literal(atom) if isinstance(atom, Literal) else values.get(atom)

    def hide(number: int, places: Iterable[int]) -> None:
        for place in places:
            constant = known(jaxpr.eqns[number].invars[place])
            if constant is None:
                continue
            given = {a for a in constant.arguments if isinstance(a, int)}
            found.arguments.update(given)
            if not given:
                found.hidden.setdefault(number, []).append(place)

    for number, eqn in enumerate(jaxpr.eqns):
        operands = [known(x) for x in eqn.invars]
        results: list[Known] = [None] * len(eqn.outvars)
        if any(x is not None for x in operands) or eqn.primitive.name == "iota":
            meant = is_meant(eqn)
            if is_program(eqn.primitive.name):
                places, used, inside = _call(eqn, operands, (lambda _: True) if meant else is_meant)
                results = inside if meant else results
                found.used.update(*(x.arguments for x in (operands[i] for i in used) if x is not None))
                hide(number, places)
            elif meant and all(x is not None for x in _that_matter(eqn, operands)):
                constants = [x for x in operands if x is not None]
                of = frozenset().union(*(x.arguments for x in constants))
                if eqn.primitive.name not in MOVING:
                    found.used.update(of)
                spread = spreads.spread(eqn, [x.spread for x in constants])
                hidden = added(eqn, operands) if eqn.primitive.name in SUMS else []
                if spread is None or hidden:
                    hide(number, {*hidden, *(floats(eqn)[:1] or [0])})
                else:
                    zeros = spreads.zeros(eqn, [x.zeros for x in constants])
                    results = [Constant(spread, of, zeros)] * len(eqn.outvars)
            elif meant and eqn.primitive.name in SUMS:
                found.used.update(*(x.arguments for x in operands if x is not None))
                hide(number, added(eqn, operands))
        values |= dict(zip(eqn.outvars, results, strict=True))
    found.results.extend(known(x) for x in jaxpr.outvars)
    return found


def _that_matter(eqn: Any, operands: list[Known]) -> list[Known]:
    """Returns the operands that decide whether XLA may fold an equation.

    It may see that a selection or its indices do not matter, for example if all numbers are equal.
    """
    places = floats(eqn) if eqn.primitive.name in MOVING else []
    return [operands[i] for i in places] if places else operands


def _call(eqn: Any, operands: list[Known], is_meant: Callable[[Any], bool]) -> tuple[list[int], list[int], list[Known]]:
    """Returns the operands of an equation with programs that are to be hidden, those used, and its results."""
    hidden: set[int] = set()
    used: set[int] = set()
    of_programs: list[tuple[list[Known], list[int]]] = []
    for program, places in _programs(eqn):
        inner = getattr(program, "jaxpr", program)
        if len(inner.invars) != len(places):
            given = [i for i, x in enumerate(operands) if x is not None and limit(eqn.invars[i].aval)]
            return given, given, [None] * len(eqn.outvars)
        found = _look(inner, [operands[i] for i in places], is_meant)
        hidden |= {places[i] for i in found.arguments}
        used |= {places[i] for i in found.used if isinstance(i, int)}
        of_programs.append((found.results, places))
    nothing: list[Known] = [None] * len(eqn.outvars)
    is_loop = eqn.primitive.name in ("scan", "while")
    bodies = [
        [_outside(x, operands, places, hidden) for x in results]
        for results, places in (of_programs[-1:] if is_loop else of_programs)
        if len(results) == len(nothing)
    ]
    if not bodies or (eqn.primitive.name == "cond" and operands[0] is None):
        return sorted(hidden), sorted(used), nothing
    found_results = _of_loop(eqn, operands, bodies[0]) if is_loop else list(map(_either, zip(*bodies, strict=True)))
    return sorted(hidden), sorted(used), found_results


def _of_loop(eqn: Any, operands: list[Known], results: list[Known]) -> list[Known]:
    """Returns the results of a loop. XLA removes one that runs once, for example over a batch of one row.

    Args:
        eqn: The equation.
        operands: Its operands.
        results: The results of its body.
    """
    if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
        return [None] * len(results)
    before = operands[-len(results) :] if eqn.primitive.name == "while" else scan_operands(eqn, operands)[1]
    values = [*map(_either, zip(before, results, strict=False)), *results[len(before) :]]
    # A loop that runs more often may have results of any magnitude.
    return [None if x is None else Constant(math.inf, x.arguments) for x in values]


def _programs(eqn: Any) -> list[tuple[Any, list[int]]]:
    """Returns the programs of an equation, and for each of their arguments the index of the operand."""
    every, parameters = list(range(len(eqn.invars))), eqn.params
    if eqn.primitive.name == "cond":
        return [(branch, every[1:]) for branch in parameters["branches"]]
    if eqn.primitive.name == "while":
        first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
        carry = every[first + second :]
        return [
            (parameters["cond_jaxpr"], [*every[:first], *carry]),
            (parameters["body_jaxpr"], [*every[first : first + second], *carry]),
        ]
    return [(parameters[name], every) for name in ("jaxpr", "call_jaxpr") if name in parameters]


def _outside(known: Known, operands: list[Known], places: list[int], hidden: set[int]) -> Known:
    """Translates a result of a program to its caller; it is unknown if one of the hidden operands enters it."""
    if known is None or any(isinstance(i, int) and places[i] in hidden for i in known.arguments):
        return None
    given = [operands[places[i]] for i in known.arguments if isinstance(i, int)]
    return known._replace(arguments=frozenset().union(*(x.arguments for x in given if x is not None)))


def _either(values: Sequence[Known]) -> Known:
    constants = [x for x in values if x is not None]
    if len(constants) < len(values):
        return None
    arguments = frozenset().union(*(x.arguments for x in constants))
    return Constant(max(x.spread for x in constants), arguments, max(x.zeros for x in constants))


def _hold(ctx: Any, constant: Any) -> Sequence[Any]:
    """Hides a constant array, unless all its numbers have normal magnitudes, and not all are zero."""
    # The owner of a program's argument is not an operation.
    if getattr(constant.owner, "name", "") != "stablehlo.constant":
        return [constant]
    numbers = _numbers(constant.owner.attributes, ctx.avals_in[0])
    is_normal = numbers is not None and spread_of(numbers) <= _OF_ARRAYS and bool(numbers.any())
    return [constant if is_normal else fences.hide_constant(constant)]


def _numbers(attributes: Any, aval: Any) -> np.ndarray | None:
    """Returns the numbers of a constant; None if they cannot be read."""
    if str(aval.dtype) not in _READ:
        return None  # reading an attribute of complex numbers is a TypeError in MLIR's Python bindings
    value = attributes["value"]
    if value.is_splat and jnp.issubdtype(aval.dtype, jnp.floating):
        return np.asarray(ir.FloatAttr(value.get_splat_value()).value)
    return np.asarray(value) if str(aval.dtype) in ("float32", "float64") else None


def _primitive(name: str, rule: Callable[..., Sequence[Any]]) -> Primitive:
    def lower(ctx: Any, constant: Any) -> Sequence[Any]:
        return lower_per_platform(ctx, name, {"cpu": rule}, lambda _, constant: [constant], constant)

    # A cached rule receives a function's parameters, not the constants. JAX 0.12 takes only one rule without a cache.
    mlir.register_lowering(primitive := Primitive(name), lower, cacheable=False)
    return primitive


def _hide(ctx: Any, constant: Any) -> Sequence[Any]:
    is_known = all(isinstance(n, int) for n in ctx.avals_in[0].shape)  # not a symbolic size
    return [fences.hide_constant(constant) if is_known else constant]


_HIDDEN: Final = _primitive("bijax_hidden_constant", _hide)
_HELD: Final = _primitive("bijax_held_constant", _hold)
