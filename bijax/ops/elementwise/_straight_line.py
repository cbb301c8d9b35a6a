"""Element-wise functions as straight-line programs: hashable, free of shapes, and proven to be element-wise."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive

# fmt: off
ELEMENTWISE: Final = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "convert_element_type", "copy", "cos",
    "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "nextafter", "not", "one_minus_square", "or", "polynomial", "population_count", "pow", "reduce_precision",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
"""Primitives that compute every element of their result from the same element of their arguments."""

_CALLS: Final = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"})
_ALIASES: Final = frozenset({"name", "optimization_barrier", "stop_gradient"})
_FILL: Final = "broadcast_in_dim"


@dataclass(frozen=True)
class Constant:
    """A number in a program, compared by its bits so that 0.0 and -0.0 give different programs."""

    dtype: str
    data: bytes

    @property
    def value(self) -> np.ndarray:
        """The number as an array without dimensions."""
        return np.frombuffer(self.data, jnp.dtype(self.dtype)).reshape(())


Operand = int | Constant


@dataclass(frozen=True)
class Step:
    """One primitive applied to earlier values (counted from the arguments on) and constants.

    Without a primitive the step spreads its one operand, a number, over the shape of the arguments.
    """

    primitive: Primitive | None
    operands: tuple[Operand, ...]
    parameters: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class StraightLine:
    """A program of element-wise steps; two programs that do the same steps are equal, whoever wrote them.

    Attributes:
        arguments: Number of arguments.
        steps: Each adds one value to the list that the arguments start.
        results: Which values are the results.
    """

    arguments: int
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Applies the program to arrays of one shape."""
        values: list[Any] = list(arrays)

        def read(operand: Operand) -> Any:
            return values[operand] if isinstance(operand, int) else operand.value

        for step in self.steps:
            operands = map(read, step.operands)
            if step.primitive is None:
                values.append(jnp.broadcast_to(next(operands), arrays[0].shape))
            else:
                values.append(step.primitive.bind(*operands, **dict(step.parameters)))
        return tuple(map(read, self.results))


def straight_line(op: str, traced: Any, shape: tuple[int, ...]) -> StraightLine:
    """Returns a function as a straight-line program.

    Args:
        op: Name of the operation, for messages.
        traced: The function traced with arguments of one shape, a closed jaxpr.
        shape: That shape; it must have at least one dimension, to tell arrays from numbers.

    Raises:
        ValueError: If the function closes over an array, or does anything that is not element-wise.
    """
    builder = _Builder(op, shape)
    arguments = len(traced.jaxpr.invars)
    builder.count = arguments
    results = builder.inline(traced.jaxpr, traced.consts, tuple(range(arguments)))
    for variable in traced.jaxpr.outvars:
        if variable.aval.shape != shape:
            raise ValueError(
                f"{op}: every result of the function must have the shape {shape} to which its arguments are broadcast,"
                f" got {variable.aval.str_short()}; change shapes outside the function."
            )
    return StraightLine(arguments, tuple(builder.steps), results)


class _Builder:
    def __init__(self, op: str, shape: tuple[int, ...]):
        self._op = op
        self._shape = shape
        self.steps: list[Step] = []
        self.count = 0

    def inline(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Operand]) -> tuple[Operand, ...]:
        """Adds the steps of a jaxpr; returns its results."""
        values: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        values.update((v, self._constant(c, v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Operand:
            return self._constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, tuple(map(read, eqn.invars))), strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        if eqn.primitive.name in _CALLS:
            called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.inline(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)
        name = eqn.primitive.name
        avals: list[list[Any]] = [[v.aval for v in side] for side in (eqn.invars, eqn.outvars)]
        known = name in ELEMENTWISE or name in _ALIASES or name == _FILL
        if not known or any(a.shape not in ((), self._shape) for a in (*avals[0], *avals[1])):
            before, after = (", ".join(a.str_short() for a in side) for side in avals)
            raise ValueError(
                f"{self._op}: the function must be element-wise, but it calls the primitive {name!r} ({before} ->"
                f" {after} for arguments of the shape {self._shape}). Reductions, matmuls, reshapes, indexing, random"
                " numbers and control flow belong outside the function; bijax has other operations for some of them."
            )
        if name in _ALIASES or (name == _FILL and avals[0][0].shape == avals[1][0].shape):
            return operands
        if name == _FILL:
            self.steps.append(Step(None, operands, ()))
        else:
            self.steps.append(Step(eqn.primitive, operands, tuple(sorted(eqn.params.items()))))
        self.count += 1
        return (self.count - 1,)

    def _constant(self, value: Any, aval: Any) -> Constant:
        traced = isinstance(value, jax.core.Tracer)
        if traced or aval.shape:
            raise ValueError(
                f"{self._op}: the function must not close over arrays, got {aval.str_short()}"
                f"{' (traced)' if traced else ''}; pass it as an argument."
            )
        return Constant(aval.dtype.name, np.asarray(value, aval.dtype).tobytes())
