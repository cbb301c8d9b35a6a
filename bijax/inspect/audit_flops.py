"""Floating-point operations of traced operations."""

import math
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp

from bijax.transform.rows.elementwise import ARITHMETIC
from bijax.transform.rules.equations import Equation

_OTHERS: Final = ("reduce_precision", "reduce_window")  # the latter's function is counted separately


def flops(equation: Equation) -> int:
    """Returns the floating-point operations of an equation, over all its runs; 0 if it computes no floats.

    Products and sums count with their terms, other arithmetic as one operation per element; a bijax kernel counts as
    the operation that it implements. Unknown operations count as zero.
    """
    if not any(jnp.issubdtype(a.dtype, jnp.inexact) for a in equation.results if hasattr(a, "dtype")):
        return 0
    if not all(isinstance(n, int) for a in (*equation.operands, *equation.results) for n in getattr(a, "shape", ())):
        return 0  # symbolic shapes
    return equation.runs * _once(equation)


def _once(equation: Equation) -> int:
    if count := _COUNTS.get(equation.name):
        return count(equation)
    if equation.name in ARITHMETIC:
        return _size(equation.results[0])
    adds = equation.name.startswith(("reduce_", "cum", "psum")) and equation.name not in _OTHERS
    return _size(equation.operands[0]) if adds or equation.name.startswith("bijax_") else 0


def _dot(equation: Equation) -> int:
    (contracted, _), _ = equation.parameters["dimension_numbers"]
    return 2 * _size(equation.results[0]) * _extent(equation.operands[0], contracted)


def _ragged_dot(equation: Equation) -> int:
    (contracted, _), _ = equation.parameters["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return 2 * _size(equation.results[0]) * _extent(equation.operands[0], contracted)


def _convolution(equation: Equation) -> int:
    kernel = equation.operands[1]
    features = _extent(kernel, equation.parameters["dimension_numbers"].rhs_spec[:1])
    return 2 * _size(equation.results[0]) * (_size(kernel) // max(features, 1))


def _product(equation: Equation) -> int:
    """Counts 2 M K N of matrices (B, M, K), (B, K, N) and (B, M, N), in either storage."""
    sizes = [_size(a) for a in (*equation.operands[:2], equation.results[0])]
    stack = math.prod(map(int, equation.results[0].shape[:-2]))
    shared = stack if all(len(a.shape) > 2 for a in equation.operands[:2]) else 1
    return 2 * math.isqrt(math.prod(sizes) // max(shared, 1))


def _joined(equation: Equation) -> int:
    rows, *weights = equation.operands
    return 2 * _extent(rows, (0,)) * sum(map(_size, weights))


def _attention(equation: Equation) -> int:
    query, key = equation.operands[:2]
    return 4 * _size(query) * _extent(key, (1,))


def _attention_gradients(equation: Equation) -> int:
    return 5 * _attention(equation) // 2


def _windows(equation: Equation) -> int:
    window: tuple[int, ...] = equation.parameters["window_dimensions"]
    return _size(equation.results[0]) * math.prod(window)


def _updates(equation: Equation) -> int:
    return _size(equation.operands[2])


_COUNTS: Final[dict[str, Callable[[Equation], int]]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "scatter-add": _updates,
    "scatter-mul": _updates,
    "bijax_matmul": _product,
    "bijax_joined_matmul": _joined,
    "bijax_k_split_matmul": _product,
    "bijax_stacked_matmul": _product,
    "bijax_weight_gradient": _product,
    "bijax_stacked_weight_gradient": _product,
    "bijax_attention": _attention,
    "bijax_attention_gradients": _attention_gradients,
}


def _extent(aval: Any, dims: tuple[int, ...]) -> int:
    return math.prod(int(aval.shape[d]) for d in dims)


def _size(aval: Any) -> int:
    return math.prod(map(int, getattr(aval, "shape", ())))
