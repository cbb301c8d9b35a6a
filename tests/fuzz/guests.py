"""Steps of random programs that found faults: shared values, flags, constants, masks, sparse and foreign code."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tests.arrays import on_device

Array = jax.Array

# fmt: off
DTYPES: Final = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bfloat16", "float16", "float32", "complex64",
)
"""Of constants that enter a program that an operation holds."""
# fmt: on


def held_by(draw: np.random.Generator) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Draws an operation that holds a function of arrays, the last of them as large as the result."""
    kinds: tuple[Callable[..., Any], ...] = (
        jax.jit,
        jax.checkpoint,
        lambda f: lambda *xs: lax.scan(lambda c, _: (f(*xs[:-1], c), None), xs[-1], None, length=2)[0],
        lambda f: lambda *xs: lax.fori_loop(0, 2, lambda _, c: (*c[:-1], f(*c)), xs)[-1],
        lambda f: lambda *xs: lax.cond(xs[-1].reshape(-1)[0] > 0, f, lambda *ys: ys[-1] * 0.5, *xs),
        lambda f: lambda *xs: lax.switch(jnp.int32(1), [lambda *ys: ys[-1], f], *xs),
        lambda f: lambda *xs: lax.map(lambda x: f(*xs[:-1], x), xs[-1][None])[0],
        lambda f: _foreign(f),
    )
    kind: Callable[[Callable[..., Array]], Callable[..., Array]] = kinds[int(draw.integers(len(kinds)))]
    return kind


def _foreign(function: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the function as a primitive whose lowering is JAX code, as other libraries have them."""
    return lambda *arrays: FOREIGN.bind(*arrays, function=function)


FOREIGN: Final = Primitive("held_by_another_library")


def _map(arrays: Any, axes: Any, *, function: Callable[..., Array]) -> tuple[Array, int]:
    return FOREIGN.bind(*arrays, function=jax.vmap(function, axes)), 0


FOREIGN.def_impl(lambda *arrays, function: function(*arrays))
FOREIGN.def_abstract_eval(
    lambda *avals, function: jax.core.ShapedArray((out := jax.eval_shape(function, *avals)).shape, out.dtype)
)
batching.primitive_batchers[FOREIGN] = _map
ad.primitive_jvps[FOREIGN] = lambda primals, tangents, *, function: jax.jvp(
    function, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents)
)
mlir.register_lowering(
    FOREIGN, mlir.lower_fun(lambda *arrays, function: function(*arrays), multiple_results=False), cacheable=False
)


def shared(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """Values that all rows share are divided by each other at the shape of the batch."""
    c = float(draw.uniform(0.5, 50))
    kinds: tuple[Callable[[], Array], ...] = (
        lambda: v / (jnp.full_like(v, c) / w),
        lambda: v * (jnp.full_like(v, c) / w).mean(),
        lambda: v + w / jnp.where(v > 0, w, w),
        lambda: v / jnp.where(v > 0, w, w),
        lambda: v / w / w,
        lambda: (w / v) / (w / c),
        lambda: (v + w / w) - w / 3,
    )
    return kinds[int(draw.integers(len(kinds)))]()


def flags(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """A recurrent cell whose carry holds constants and a flag."""
    level = float(draw.uniform(-1, 1))

    def step(carry: tuple[Array, Array, Array], x: Array) -> tuple[tuple[Array, Array, Array], Array]:
        h, done, length = carry
        h = jnp.tanh(jnp.where(done, 0.0, h) * w + x).astype(v.dtype)
        length = jnp.where(done, length, length + 1)
        return (h, done | (h > level), length), h / ((5.0 + length) / 6.0) ** 0.6

    start = (jnp.zeros_like(v), jnp.zeros(v.shape, bool), jnp.zeros(v.shape, jnp.float32))
    return lax.scan(step, start, jnp.stack([v, v * 0.5, v - 1]))[1].sum(0)


def constants(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """A constant of any dtype goes into a program that an operation holds."""
    dtype = DTYPES[int(draw.integers(len(DTYPES)))]
    constant = on_device(draw.integers(0, 2, v.shape), dtype)
    if draw.integers(2):
        constant = jnp.full(v.shape, int(draw.integers(0, 2)), dtype)

    def inner(flag: Array, c: Array, x: Array) -> Array:
        chosen = jnp.where(flag.real != 0, c, jnp.float32(0.0))
        return (jnp.exp(chosen) * x + flag.real.astype(jnp.float32)).astype(x.dtype)

    return held_by(draw)(inner)(constant, jnp.zeros(v.shape, jnp.float32), v)


def masks(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """Reductions under a mask, which may be a constant."""
    mask = v > w if draw.integers(2) else on_device(np.arange(v.size) % 2 == 0)
    kinds: tuple[Callable[[], Array], ...] = (
        lambda: v + jnp.std(v, where=mask),
        lambda: v + jnp.std(jnp.full(v.shape, 0.3, v.dtype), where=jnp.ones(v.shape, bool)),
        lambda: jax.nn.softmax(v, where=mask | (v == v.max())),
        lambda: jnp.where(mask, v, -jnp.inf).max() - v,
        lambda: v * jnp.mean(v, where=mask | True),
    )
    return kinds[int(draw.integers(len(kinds)))]()


def sparse_product(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """A product with a sparse matrix that all rows share."""
    places = np.argwhere(draw.uniform(size=(v.size, v.size)) < 0.3)
    values = on_device(draw.standard_normal(len(places)), v.dtype)
    matrix = sparse.BCOO((values, jnp.asarray(places)), shape=(v.size, v.size))
    return matrix @ v


def complex_numbers(draw: np.random.Generator, v: Array, w: Array) -> Array:
    """Products and quotients of complex numbers."""
    a, b = (lax.complex(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in ((v, w), (w, v)))
    kinds: tuple[Callable[[], Array], ...] = (
        lambda: (a * b + a).real,
        lambda: (a / (2 + b * b.conj())).imag,
        lambda: a.at[1:-1].multiply(2).real + b.imag,
        lambda: jnp.abs(a * a + 1),
    )
    return kinds[int(draw.integers(len(kinds)))]()


GUESTS: Final = (shared, flags, constants, masks, sparse_product, complex_numbers)
