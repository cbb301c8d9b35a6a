"""Operations on complex numbers as operations on their real and imaginary parts.

XLA expands complex arithmetic into products and sums of parts after the program is lowered, where no fences can be put
between them. Expanded here, each of these is a JAX operation, and is lowered like any other.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.transform.expansions._complex_scatter import scatter_mul

Parts = tuple[jax.Array, jax.Array]


def _parts(z: jax.Array) -> Parts:
    return (lax.real(z), lax.imag(z)) if jnp.iscomplexobj(z) else (z, jnp.zeros_like(z))


def multiply(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """The product: four products of parts and two sums."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return lax.complex(a * c - b * d, a * d + b * c)


def add(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """The sum, by parts."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return lax.complex(a + c, b + d)


def subtract(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """The difference, by parts."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return lax.complex(a - c, b - d)


def convert(x: jax.Array, *, new_dtype: Any, **_: Any) -> jax.Array:
    """The conversion to another complex dtype, by parts, or of the real part to a dtype without an imaginary one."""
    if not jnp.issubdtype(new_dtype, jnp.complexfloating):
        return lax.convert_element_type(lax.real(x), new_dtype)
    part = np.finfo(new_dtype).dtype
    a, b = _parts(x)
    return lax.complex(lax.convert_element_type(a, part), lax.convert_element_type(b, part))


def square(x: jax.Array, **_: Any) -> jax.Array:
    """The square; the real part is the product of sum and difference, which avoids a second cancellation."""
    a, b = _parts(x)
    return lax.complex((a - b) * (a + b), 2 * (a * b))


def integer_power(x: jax.Array, *, y: int, **_: Any) -> jax.Array:
    """The power, by repeated squaring."""
    if y < 0:
        return divide(jnp.ones_like(x), integer_power(x, y=-y))
    result, factor = None, x
    while y:
        if y & 1:
            result = factor if result is None else multiply(result, factor)
        y >>= 1
        factor = multiply(factor, factor) if y else factor
    return jnp.ones_like(x) if result is None else result


def polynomial(x: jax.Array, *coefficients: jax.Array, **_: Any) -> jax.Array:
    """The polynomial, by Horner's rule; the constant coefficient comes first."""
    shape = jnp.broadcast_shapes(x.shape, *(c.shape for c in coefficients))
    result = jnp.broadcast_to(coefficients[-1], shape)
    for c in coefficients[-2::-1]:
        result = add(multiply(result, x), c)
    return result


def one_minus_square(x: jax.Array, **_: Any) -> jax.Array:
    """One minus the square."""
    return subtract(jnp.ones_like(x), square(x))


def divide(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """The quotient by Smith's formula, halving all parts if one is so large that a sum of two could overflow.

    Source: R. L. Smith, Algorithm 116: Complex division, Communications of the ACM 5 (1962).
    """
    (a, b), (c, d) = _parts(x), _parts(y)
    shape = jnp.broadcast_shapes(a.shape, c.shape)
    a, b, c, d = (jnp.broadcast_to(v, shape) for v in (a, b, c, d))
    largest = functools.reduce(lax.max, map(jnp.abs, (a, b, c, d)))
    half = jnp.where(largest > float(np.finfo(a.dtype).max) / 4, 0.5, 1).astype(a.dtype)
    a, b, c, d = (v * half for v in (a, b, c, d))
    swap = jnp.abs(c) < jnp.abs(d)
    large, small = jnp.where(swap, d, c), jnp.where(swap, c, d)
    ratio = jnp.where(small == 0, small, small / large)
    denominator = large + small * ratio
    first, second = jnp.where(swap, b, a), jnp.where(swap, a, b)
    real, imaginary = first + second * ratio, second - first * ratio
    return lax.complex(real / denominator, jnp.where(swap, -imaginary, imaginary) / denominator)


def absolute(x: jax.Array, **_: Any) -> jax.Array:
    """The absolute value, without overflow: the larger part times the square root of 1 + (smaller / larger)²."""
    a, b = map(jnp.abs, _parts(x))
    large, small = lax.max(a, b), lax.min(a, b)
    ratio = jnp.where(large == 0, large, small / large)
    size = large * lax.sqrt(1 + ratio * ratio)
    return jnp.where(jnp.isinf(a) | jnp.isinf(b), jnp.array(jnp.inf, size.dtype), size)


def sign(x: jax.Array, **_: Any) -> jax.Array:
    """The number of absolute value 1 in the same direction; 0 for 0."""
    a, b = _parts(x)
    size = absolute(x)
    zero = size == 0
    size = jnp.where(zero, jnp.ones_like(size), size)
    return lax.complex(jnp.where(zero, a, a / size), jnp.where(zero, b, b / size))


def exponential(x: jax.Array, **_: Any) -> jax.Array:
    """E to a complex power."""
    a, b = _parts(x)
    c, s = lax.cos(b), lax.sin(b)
    size, half = lax.exp(a), lax.exp(a / 2)
    # Where e^a overflows, its product with a small cosine may not.
    over = size == jnp.inf
    real, imaginary = (jnp.where(over, half * v * half, size * v) for v in (c, s))
    # A real number has a real exponential, an infinite one too; and e to minus infinity is zero in all directions.
    none = a == -jnp.inf
    zero = jnp.zeros_like(a)
    return lax.complex(
        jnp.where(none, zero, jnp.where(b == 0, size, real)), jnp.where(none, zero, jnp.where(b == 0, b, imaginary))
    )


def exponential_minus_one(x: jax.Array, **_: Any) -> jax.Array:
    """E to a complex power, minus one: e^a cos b - 1 = (e^a - 1) cos b - 2 sin²(b/2)."""
    a, b = _parts(x)
    sine = lax.sin(b / 2)
    real = lax.expm1(a) * lax.cos(b) - 2 * (sine * sine)
    full = exponential(x)
    return lax.complex(jnp.where(jnp.abs(a) < 1, real, lax.real(full) - 1), lax.imag(full))


def exponential_of_two(x: jax.Array, **_: Any) -> jax.Array:
    """2 to a complex power."""
    a, b = _parts(x)
    return exponential(lax.complex(*(v * v.dtype.type(np.log(2)) for v in (a, b))))


def logarithm(x: jax.Array, **_: Any) -> jax.Array:
    """The principal logarithm: the logarithm of the absolute value, and the angle."""
    a, b = _parts(x)
    large, small = lax.max(jnp.abs(a), jnp.abs(b)), lax.min(jnp.abs(a), jnp.abs(b))
    # Near an absolute value of 1, the sum of squares minus one is computed without cancellation: (large² - 1) + small².
    near = lax.log1p((large - 1) * (large + 1) + small * small) / 2
    size = absolute(x)
    real = jnp.where((size > 0.5) & (size < 2), near, lax.log(size))
    return lax.complex(real, lax.atan2(b, a))


def logarithm_to_base_two(x: jax.Array, **_: Any) -> jax.Array:
    """The principal logarithm to the base 2."""
    a, b = _parts(logarithm(x))
    return lax.complex(*(v / v.dtype.type(np.log(2)) for v in (a, b)))


def logarithm_of_one_plus(x: jax.Array, **_: Any) -> jax.Array:
    """The principal logarithm of 1 + x, exact near zero: half of log1p(2a + a² + b²)."""
    a, b = _parts(x)
    near = lax.log1p(a * (2 + a) + b * b) / 2
    far = logarithm(lax.complex(1 + a, b))
    return lax.complex(jnp.where((jnp.abs(a) < 0.5) & (jnp.abs(b) < 0.5), near, lax.real(far)), lax.imag(far))


def square_root(x: jax.Array, **_: Any) -> jax.Array:
    """The principal square root, from the root of (|x| + |real part|) / 2."""
    a, b = _parts(x)
    kind = np.finfo(a.dtype)
    # The terms of the sum must not be flushed to zero.
    is_small = absolute(x) < float(kind.tiny) * 16
    a, b = (v * jnp.where(is_small, 4.0**kind.nmant, 1).astype(v.dtype) for v in (a, b))
    size = absolute(lax.complex(a, b))
    # Divided by 4 first, since the sum could overflow.
    root = 2 * lax.sqrt(jnp.abs(a) / 8 + size / 8)
    other = jnp.abs(b) / jnp.where(root == 0, jnp.ones_like(root), 2 * root)
    real, imaginary = jnp.where(a >= 0, root, other), jnp.where(a >= 0, other, root)
    real, imaginary = (v * jnp.where(is_small, 2.0**-kind.nmant, 1).astype(v.dtype) for v in (real, imaginary))
    return lax.complex(real, jnp.where(jnp.signbit(b), -imaginary, imaginary))


def reciprocal_square_root(x: jax.Array, **_: Any) -> jax.Array:
    """One over the principal square root."""
    return divide(jnp.ones_like(x), square_root(x))


def power(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """The principal power, e^(y log x); 0 to a power of positive real part is 0, and to the power 0 it is 1."""
    y = y if jnp.iscomplexobj(y) else lax.complex(y.astype(lax.real(x).dtype), jnp.zeros(y.shape, lax.real(x).dtype))
    result = exponential(multiply(y, logarithm(x)))
    base, exponent = (absolute(v) == 0 for v in (x, y))
    result = jnp.where(base & (lax.real(y) > 0) & ~jnp.isnan(lax.imag(y)), jnp.zeros_like(result), result)
    return jnp.where(exponent, jnp.ones_like(result), result)


def _times(zero_or_not: jax.Array, size: jax.Array) -> jax.Array:
    """Returns a product that is zero where its first factor is, even if the second overflows."""
    return zero_or_not * jnp.where(zero_or_not == 0, jnp.where(size < 0, -1, 1).astype(size.dtype), size)


def sine(x: jax.Array, **_: Any) -> jax.Array:
    """Sin a cosh b + i cos a sinh b."""
    a, b = _parts(x)
    return lax.complex(_times(lax.sin(a), lax.cosh(b)), lax.cos(a) * lax.sinh(b))


def cosine(x: jax.Array, **_: Any) -> jax.Array:
    """Cos a cosh b - i sin a sinh b."""
    a, b = _parts(x)
    return lax.complex(lax.cos(a) * lax.cosh(b), -_times(lax.sin(a), lax.sinh(b)))


def hyperbolic_sine(x: jax.Array, **_: Any) -> jax.Array:
    """Sinh a cos b + i cosh a sin b."""
    a, b = _parts(x)
    return lax.complex(lax.sinh(a) * lax.cos(b), _times(lax.sin(b), lax.cosh(a)))


def hyperbolic_cosine(x: jax.Array, **_: Any) -> jax.Array:
    """Cosh a cos b + i sinh a sin b."""
    a, b = _parts(x)
    return lax.complex(lax.cosh(a) * lax.cos(b), _times(lax.sin(b), lax.sinh(a)))


def hyperbolic_tangent(x: jax.Array, **_: Any) -> jax.Array:
    """(sinh a cosh a + i sin b cos b) / (sinh² a + cos² b), and ±1 for a real part beyond the range of cosh."""
    a, b = _parts(x)
    far = jnp.abs(a) > 20
    near = jnp.where(far, jnp.zeros_like(a), a)
    s, c = lax.sinh(near), lax.cos(b)
    denominator = s * s + c * c
    return lax.complex(
        jnp.where(far, lax.sign(a), s * lax.cosh(near) / denominator),
        jnp.where(far, jnp.zeros_like(b), lax.sin(b) * c / denominator),
    )


def tangent(x: jax.Array, **_: Any) -> jax.Array:
    """-i tanh(i x)."""
    a, b = _parts(x)
    turned = hyperbolic_tangent(lax.complex(-b, a))
    return lax.complex(lax.imag(turned), -lax.real(turned))


def logistic(x: jax.Array, **_: Any) -> jax.Array:
    """1 / (1 + e^-x), and e^x where e^-x overflows."""
    near = divide(jnp.ones_like(x), add(jnp.ones_like(x), exponential(-x)))
    real = lax.real(x)
    return jnp.where(real < 1 - float(np.log(np.finfo(real.dtype).max)), exponential(x), near)


def equal(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """Whether both parts are equal."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return (a == c) & (b == d)


def not_equal(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """Whether either part differs."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return (a != c) | (b != d)


def _bilinear(primitive: Any) -> Callable[..., jax.Array]:
    """Returns a product of two arrays as real products of their parts."""

    def run(x: jax.Array, y: jax.Array, *, preferred_element_type: Any = None, **parameters: Any) -> jax.Array:
        real = preferred_element_type is not None and not jnp.issubdtype(preferred_element_type, jnp.complexfloating)
        if preferred_element_type is not None:
            preferred_element_type = np.finfo(preferred_element_type).dtype

        def product(u: jax.Array, v: jax.Array) -> jax.Array:
            return primitive.bind(u, v, preferred_element_type=preferred_element_type, **parameters)

        (a, b), (c, d) = _parts(x), _parts(y)
        real_part = product(a, c) - product(b, d)
        return real_part if real else lax.complex(real_part, product(a, d) + product(b, c))

    return run


def _linear(primitive: Any) -> Callable[..., jax.Array]:
    """Returns an operation that is linear in its operands, by parts."""

    def run(*operands: jax.Array, **parameters: Any) -> jax.Array:
        def part(take: Callable[[jax.Array], jax.Array]) -> jax.Array:
            # The indices of a scatter have no parts.
            return primitive.bind(*(take(x) if jnp.iscomplexobj(x) else x for x in operands), **parameters)

        return lax.complex(part(lax.real), part(lax.imag))

    return run


def reduce_product(x: jax.Array, *, axes: tuple[int, ...], **_: Any) -> jax.Array:
    """The product along axes, as a tree of neighbours."""
    return lax.reduce(x, np.ones((), x.dtype), lambda a, b: a * b, axes)


def cumulative_product(x: jax.Array, *, axis: int, reverse: bool, **_: Any) -> jax.Array:
    """The products of the elements up to each."""
    return lax.associative_scan(lax.mul, x, reverse=reverse, axis=axis)


COMPLEX: Final[dict[str, Callable[..., jax.Array]]] = {
    "abs": absolute,
    "add": add,
    "add_any": add,
    "conv_general_dilated": _bilinear(lax.conv_general_dilated_p),
    "convert_element_type": convert,
    "cos": cosine,
    "cosh": hyperbolic_cosine,
    "cumprod": cumulative_product,
    "cumsum": _linear(lax.cumsum_p),
    "div": divide,
    "dot_general": _bilinear(lax.dot_general_p),
    "eq": equal,
    "exp": exponential,
    "exp2": exponential_of_two,
    "expm1": exponential_minus_one,
    "integer_pow": integer_power,
    "log": logarithm,
    "log2": logarithm_to_base_two,
    "log1p": logarithm_of_one_plus,
    "logistic": logistic,
    "mul": multiply,
    "ne": not_equal,
    "one_minus_square": one_minus_square,
    "polynomial": polynomial,
    "pow": power,
    "reduce_prod": reduce_product,
    "reduce_sum": _linear(lax.reduce_sum_p),
    "reduce_window_sum": _linear(lax.reduce_window_sum_p),
    "rsqrt": reciprocal_square_root,
    "scatter-add": _linear(lax.scatter_add_p),
    "scatter-mul": scatter_mul,
    "scatter-sub": _linear(lax.scatter_sub_p),
    "sign": sign,
    "sin": sine,
    "sinh": hyperbolic_sine,
    "sqrt": square_root,
    "square": square,
    "sub": subtract,
    "tan": tangent,
    "tanh": hyperbolic_tangent,
}
"""The expansion of each primitive for complex numbers; it takes the primitive's operands and parameters."""
