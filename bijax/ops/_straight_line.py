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
    "neg", "nextafter", "not", "one_minus_square", "or", "population_count", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
"""Primitives that compute every element of their result from the same element of their arguments."""

_CALLS: Final = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"})
_ALIASES: Final = frozenset({"broadcast_in_dim", "name", "optimization_barrier", "stop_gradient"})


@dataclass(frozen=True)
class Constant:
    """A number in a program, kept by its bits so that 0.0 and -0.0 are two programs."""

    dtype: str
    data: bytes

    @property
    def value(self) -> np.ndarray:
        """The number as an array without dimensions."""
        return np.frombuffer(self.data, jnp.dtype(self.dtype)).reshape(())


Operand = int | Constant


@dataclass(frozen=True)
class Step:
    """One primitive applied to earlier values (counted from the arguments on) and constants."""

    primitive: Primitive
    operands: tuple[Operand, ...]
    parameters: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class StraightLine:
    """A program of element-wise steps; two programs that do the same steps are equal, whoever wrote them.

    Attributes:
        arguments: Number of arguments.
        steps: Each adds one value to the list that the arguments start.
        results: Which values, or constants, are the results.
    """

    arguments: int
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Applies the program to arrays of one shape."""
        shape = arrays[0].shape
        values = list(arrays)

        def read(operand: Operand) -> jax.Array:
            return values[operand] if isinstance(operand, int) else jnp.broadcast_to(operand.value, shape)

        for step in self.steps:
            values.append(step.primitive.bind(*map(read, step.operands), **dict(step.parameters)))
        return tuple(map(read, self.results))


def straight_line(op: str, traced: Any, shape: tuple[int, ...]) -> StraightLine:
    """Returns what a function does as a straight-line program.

    Args:
        op: Name of the operation, for messages.
        traced: The function traced with arguments of one shape, a closed jaxpr.
        shape: That shape.

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
                f" got {variable.aval.str_short()}; do what changes shapes outside of it."
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
        values.update(zip(jaxpr.constvars, map(self._constant, consts), strict=True))

        def read(atom: Any) -> Operand:
            return self._constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, tuple(map(read, eqn.invars))), strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        if eqn.primitive.name in _CALLS:
            called: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.inline(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)
        avals: list[list[Any]] = [[v.aval for v in side] for side in (eqn.invars, eqn.outvars)]
        name = eqn.primitive.name
        if name not in ELEMENTWISE | _ALIASES or any(a.shape not in ((), self._shape) for a in (*avals[0], *avals[1])):
            before, after = (", ".join(a.str_short() for a in side) for side in avals)
            raise ValueError(
                f"{self._op}: the function must be element-wise, but it calls the primitive {name!r} ({before} ->"
                f" {after} for arguments of the shape {self._shape}). Reductions, matmuls, reshapes, indexing, random"
                " numbers and control flow belong outside of it; use the other operations of bijax for what they cover."
            )
        if name in _ALIASES:
            return operands
        self.steps.append(Step(eqn.primitive, operands, tuple(sorted(eqn.params.items()))))
        self.count += 1
        return (self.count - 1,)

    def _constant(self, value: Any) -> Constant:
        if isinstance(value, jax.core.Tracer) or np.ndim(value):
            raise ValueError(
                f"{self._op}: the function must not close over arrays, got {jnp.result_type(value)}{np.shape(value)}"
                f"{' (traced)' if isinstance(value, jax.core.Tracer) else ''}; pass it as an argument."
            )
        array = np.asarray(value, dtype=jnp.result_type(value))
        return Constant(array.dtype.name, array.tobytes())
