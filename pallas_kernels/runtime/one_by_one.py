"""Runs a program one operation at a time, as a reference without fusion or reordering by a compiler.

XLA compiles each piece between barriers separately, so the result equals that of the operations run one by one. Exact
and correctly rounded operations run in NumPy, which needs no compiler; products and functions such as the exponential
are compiled one at a time. A program of fifty kernels compiles in a second, its five or six products and functions in a
tenth of that.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Literal, Primitive

from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options
from pallas_kernels.runtime.own_settings import own_settings

_TINY: Final = np.finfo(np.float32).tiny

Values = list[np.ndarray]


def one_by_one(program: Callable[..., Any], *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the results of a program whose operations run one by one.

    Args:
        program: Maps arrays to a pytree of arrays.
        *arrays: Its arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> one_by_one(lambda x: (jnp.exp(x) * 2,), np.zeros(3, np.float32))[0].tolist()
        [2.0, 2.0, 2.0]
    """
    with own_settings(arrays):
        closed = jax.make_jaxpr(program)(*arrays)
    with np.errstate(all="ignore"):
        return tuple(_run(closed, arrays))


def _run(closed: Any, arguments: Sequence[Any]) -> Values:
    jaxpr = closed.jaxpr
    values: dict[Any, np.ndarray] = {}

    def read(atom: Any) -> np.ndarray:
        aval = atom.aval
        return np.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else values[atom]

    for variable, value in zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True):
        values[variable] = np.asarray(value)
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        name, outs = equation.primitive.name, [v.aval for v in equation.outvars]
        rule: Callable[..., Values] = _RULES.get(name, _alone)
        if name in _FOR_INTEGERS and operands[0].dtype.kind == "f":
            rule = _alone
        for variable, aval, found in zip(equation.outvars, outs, rule(equation, *operands), strict=True):
            values[variable] = np.asarray(found, aval.dtype)
    return [read(atom) for atom in jaxpr.outvars]


def _alone(equation: Any, *operands: np.ndarray) -> Values:
    """Runs an operation as a separate program."""
    shapes = tuple((x.shape, x.dtype.name) for x in operands)
    parameters = tuple(sorted(equation.params.items()))
    found = _compiled(equation.primitive, shapes, parameters)(*operands)
    return [np.asarray(x) for x in (found if equation.primitive.multiple_results else [found])]


@cached_for_options(maxsize=256)
def _compiled(
    primitive: Primitive, shapes: tuple[tuple[tuple[int, ...], str], ...], parameters: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    options = dict(parameters)

    def run(*arrays: jax.Array) -> Any:
        bind: Callable[..., Any] = primitive.bind
        return bind(*arrays, **options)

    return ahead_of_time(run, *operands)


def _rounded(function: Callable[..., Any]) -> Callable[..., Values]:
    """Returns the rule of a correctly rounded operation; XLA:CPU flushes subnormal numbers to zero."""

    def rule(_: Any, *operands: np.ndarray) -> Values:
        found = np.asarray(function(*(_without_subnormal(x) for x in operands)))
        return [_without_subnormal(found)]

    return rule


def _without_subnormal(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x


def _divide(x: np.ndarray, y: np.ndarray) -> Any:
    return x / y if x.dtype.kind == "f" else np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Values]:
    return lambda _, *operands: [function(*operands)]


def _reduction(function: np.ufunc) -> Callable[..., Values]:
    return lambda equation, x: [function.reduce(x, axis=tuple(equation.params["axes"]))]


def _broadcast(equation: Any, x: np.ndarray) -> Values:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    lengths = [1] * len(shape)
    for place, length in zip(places, x.shape, strict=True):
        lengths[place] = length
    return [np.broadcast_to(x.reshape(lengths), shape)]


def _iota(equation: Any) -> Values:
    shape, dimension = equation.params["shape"], equation.params["dimension"]
    lengths = [n if i == dimension else 1 for i, n in enumerate(shape)]
    return [np.broadcast_to(np.arange(shape[dimension]).reshape(lengths), shape)]


def _pad(equation: Any, x: np.ndarray, value: np.ndarray) -> Values:
    config = equation.params["padding_config"]
    if any(low < 0 or high < 0 or inside for low, high, inside in config):
        return _alone(equation, x, value)
    return [np.pad(x, [(low, high) for low, high, _ in config], constant_values=value)]


def _slice(equation: Any, x: np.ndarray) -> Values:
    p = equation.params
    places = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * x.ndim, strict=True)
    return [x[tuple(slice(*place) for place in places)]]


def _window(x: np.ndarray, lengths: Sequence[int], starts: Sequence[np.ndarray]) -> tuple[slice, ...]:
    """Returns the slices of a window, with starts clamped to the array as XLA does."""
    firsts = (max(0, min(int(s), n - length)) for s, n, length in zip(starts, x.shape, lengths, strict=True))
    return tuple(slice(first, first + length) for first, length in zip(firsts, lengths, strict=True))


def _dynamic_slice(equation: Any, x: np.ndarray, *starts: np.ndarray) -> Values:
    return [x[_window(x, equation.params["slice_sizes"], starts)]]


def _dynamic_update_slice(_: Any, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> Values:
    result = x.copy()
    result[_window(x, update.shape, starts)] = update
    return [result]


def _while(equation: Any, *operands: np.ndarray) -> Values:
    p = equation.params
    first, last = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    for_condition, for_body, state = operands[:first], operands[first:last], list(operands[last:])
    while _run(p["cond_jaxpr"], (*for_condition, *state))[0]:
        state = _run(p["body_jaxpr"], (*for_body, *state))
    return state


def _cond(equation: Any, index: np.ndarray, *operands: np.ndarray) -> Values:
    branches = equation.params["branches"]
    return _run(branches[max(0, min(int(index), len(branches) - 1))], operands)


_RULES: Final[dict[str, Callable[..., Values]]] = {
    **{name: _rounded(f) for name, f in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply))},
    "div": _rounded(_divide),
    "rem": _elementwise(np.fmod),
    "abs": _elementwise(np.abs),
    "sign": _elementwise(np.sign),
    "is_finite": _elementwise(np.isfinite),
    "and": _elementwise(np.bitwise_and),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "select_n": _elementwise(lambda which, first, second: np.where(which, second, first)),
    "reduce_max": _reduction(np.maximum),
    "reduce_min": _reduction(np.minimum),
    "reduce_and": _reduction(np.logical_and),
    "convert_element_type": lambda equation, x: [x.astype(equation.params["new_dtype"])],
    "reshape": lambda equation, x: [x.reshape(equation.params["new_sizes"])],
    "squeeze": lambda equation, x: [np.squeeze(x, axis=tuple(equation.params["dimensions"]))],
    "transpose": lambda equation, x: [x.transpose(equation.params["permutation"])],
    "unstack": lambda equation, x: list(np.moveaxis(x, equation.params["axis"], 0)),
    "optimization_barrier": lambda _, *operands: list(operands),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "while": _while,
    "cond": _cond,
    "jit": lambda equation, *operands: _run(equation.params["jaxpr"], operands),
}

_FOR_INTEGERS: Final = frozenset({"max", "min", "rem", "reduce_max", "reduce_min"})
"""For floats, the results would be ambiguous for signed zeros and nan."""
