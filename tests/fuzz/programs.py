"""Random programs of one example: products, loops, transposes, norms, casts and element-wise code between them.

`Fuzz(seed)` is a program, the shapes and dtype of its arguments, the axes that carry the batch, and what is asked of it
(the values, their gradients, the values of a `scan`). `differences` compiles it for several sizes of the batch and
compares bits. Choices are drawn while the program is traced, from the seed alone, so every trace makes the same ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from bijax.testing._bits import unequal_bits
from tests.arrays import on_device
from tests.fuzz.guests import GUESTS

Array = jax.Array
Draw = np.random.Generator

SIZES: Final = (1, 2, 3, 5, 8, 33, 64)
_DTYPES: Final = ("float32", "bfloat16", "float32", "float16", "float32", "bfloat16", "float64")
_LENGTHS: Final = (1, 3, 7, 8, 16, 19, 33, 40, 64)

UNARY: Final[tuple[Callable[[Array], Array], ...]] = (
    jnp.tanh,
    lambda x: jnp.exp(-jnp.abs(x)),
    jax.nn.sigmoid,
    jax.nn.gelu,
    jax.nn.silu,
    jax.nn.softplus,
    jnp.sin,
    jnp.cos,
    jnp.cbrt,
    jnp.arctan,
    jnp.expm1,
    lax.erf,
    lambda x: lax.erf_inv(jnp.tanh(x) * 0.9),
    lambda x: lax.lgamma(jnp.abs(x) + 1),
    lambda x: jnp.log1p(jnp.abs(x)),
    lambda x: lax.rsqrt(jnp.abs(x) + 0.1),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    lambda x: jnp.power(jnp.abs(x) + 0.1, 1.7),
    lambda x: x**3 * 0.1,
    lambda x: (x + 1.1) + 2.3,
    lambda x: x * 0.3 - 1.7,
    lambda x: x / 3,
    lambda x: 3 / (1 + jnp.abs(x)),
    lambda x: jnp.where(x > 0, x, x * 0.01),
    lambda x: jnp.remainder(x, 0.7),
    lambda x: jnp.floor(x) * 0.5,
)
BINARY: Final[tuple[Callable[[Array, Array], Array], ...]] = (
    lambda a, b: a * b + a,
    lambda a, b: a * b - b * b,
    lambda a, b: a / (1 + jnp.abs(b)),
    lambda a, b: jnp.where(a > b, a * 2 + b, b * 3 - a),
    lambda a, b: a * 0.5 + b * 0.25,
    lambda a, b: jnp.maximum(a, b) - b,
    lambda a, b: jnp.hypot(a, b + 1),
    lambda a, b: jnp.arctan2(a, b + 2),
    lambda a, b: jnp.logaddexp(a, b),
    lambda a, b: a + jax.nn.sigmoid(b) * (a - b),
)
MOVES: Final[tuple[Callable[[Array], Array], ...]] = (
    lambda v: v[::-1],
    lambda v: jnp.roll(v, 1),
    lambda v: jnp.concatenate([v[v.size // 2 :], v[: v.size // 2]]),
    lambda v: jnp.pad(v, (1, 2)),
    lambda v: jnp.concatenate([v, v[:1] * 2]),
    lambda v: jnp.repeat(v, 2)[: v.size],
    lambda v: v[: max(1, v.size - 1)],
)
NORMS: Final[tuple[Callable[[Array], Array], ...]] = (
    lambda v: v - v.mean(-1, keepdims=True),
    lambda v: v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-3),
    lambda v: (v - v.mean(-1, keepdims=True)) / jnp.sqrt(v.var(-1, keepdims=True) + 1e-2),
    lambda v: jax.nn.softmax(v, -1) * v.shape[-1],
    lambda v: v - jax.nn.logsumexp(v, -1, keepdims=True),
    lambda v: v / (jnp.abs(v).max(-1, keepdims=True) + 1),
    lambda v: jnp.cumsum(v, -1) * 0.1,
    lambda v: v + jnp.sort(v, -1),
)
CASTS: Final = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Fuzz:
    """A random program over a batch.

    Attributes:
        seed: From which everything is drawn.
        kernels: Whether it holds products and row reductions, which become kernels.
        guests: Whether it holds the steps of `tests.fuzz.guests`.
    """

    seed: int
    kernels: bool = True
    guests: bool = False

    @property
    def dtype(self) -> str:
        """Dtype of its arguments and constants."""
        return _DTYPES[self.seed % len(_DTYPES)]

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Shapes of the vector and of the matrix that make an example."""
        rows, columns, length = self._draw(1).choice(_LENGTHS, 3).tolist()
        return (length,), (min(rows, 8), columns)

    @functools.cached_property
    def axes(self) -> tuple[int, int, int]:
        """Axes that carry the batch: of the vectors, of the matrices, of the results."""
        draw = self._draw(2)
        return int(draw.integers(0, 2)), int(draw.integers(0, 3)), int(draw.integers(0, 2))

    @property
    def asked(self) -> str:
        """What is computed: "values", "gradients" or "scan"."""
        return ("values", "gradients", "scan")[self.seed // len(_DTYPES) % 3]

    def arguments(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the vectors and matrices of the largest batch, batch in front; some rows are hostile."""
        draw = self._draw(3)
        vectors, matrices = (draw.standard_normal((SIZES[-1], *shape)) * 1.5 for shape in self.shapes)
        vectors[5] *= 1e-39  # subnormal in float32
        vectors[6] *= 100
        vectors[7, ::2] = 0.0
        matrices[9] *= -1e-3
        return vectors, matrices

    def example(self, v: Array, m: Array) -> Array:
        """The program of one example.

        Args:
            v: A vector.
            m: A matrix.
        """
        draw = self._draw(4)
        vectors, matrices = [v], [m]
        steps = (_unary, _binary, _move, _cast, _matrix, _cell, _branch)
        if self.kernels:
            steps = (*steps, _product, _norm, _loop, _matrix_product, _product)
        if self.guests:
            steps = (*steps, *[functools.partial(_guest, guest) for guest in GUESTS], _guest_of_two)
        for _ in range(int(draw.integers(6, 11))):
            step = steps[int(draw.integers(len(steps)))]
            step(self, draw, vectors, matrices)
        return _fit(vectors[-1], 16) + _fit(vectors[len(vectors) // 2], 16) * _fit(matrices[-1].reshape(-1), 16)

    def batched(self) -> Callable[[Array, Array], Any]:
        """Returns the program over a batch, in the axes that were drawn."""
        first, second, last = self.axes
        values = jax.vmap(self.example, (first, second), last)
        if self.asked == "gradients":

            def total(v: Array, m: Array) -> Array:
                return self.example(v, m).astype(jnp.float32).sum()

            both = jax.vmap(jax.value_and_grad(total, (0, 1)), (first, second), (0, (first, second)))
            return lambda v, m: (values(v, m), both(v, m)[1])
        if self.asked == "scan":

            def step(carry: Array, scale: Array) -> tuple[Array, Array]:
                out = values(carry[0], carry[1])
                moved = jnp.moveaxis(out, last, 0)[:, :1].astype(carry[0].dtype)
                update = jnp.tanh(jnp.moveaxis(carry[0], first, 0) * scale + moved)
                return (jnp.moveaxis(update, 0, first), carry[1]), out

            return lambda v, m: lax.scan(step, (v, m), jnp.asarray([0.5, -1.25, 0.75], v.dtype))
        return values

    def result_axes(self) -> tuple[int, ...]:
        """Returns the axis that carries the batch in each array of the result."""
        first, second, last = self.axes
        return {"values": (last,), "gradients": (last, first, second), "scan": (first, second, last + 1)}[self.asked]

    def constant(self, draw: Draw, *shape: int) -> Array:
        """Draws weights."""
        return on_device(draw.standard_normal(shape) / np.sqrt(shape[-1]), self.dtype)

    def _draw(self, what: int) -> Draw:
        return np.random.default_rng((self.seed, what, self.kernels, *((1,) if self.guests else ())))


def _pick(draw: Draw, choices: Sequence[Any]) -> Any:
    return choices[int(draw.integers(len(choices)))]


def _fit(v: Array, length: int) -> Array:
    """Returns a vector cut or repeated to a length."""
    return jnp.tile(v, -(-length // v.size))[:length]


def _unary(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    vectors.append(_pick(draw, UNARY)(_pick(draw, vectors)))


def _binary(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    a = _pick(draw, vectors)
    b = _pick(draw, (vectors[-1], fuzz.constant(draw, a.size)))
    vectors.append(_pick(draw, BINARY)(a, _fit(b, a.size).astype(a.dtype)))


def _move(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    vectors.append(_pick(draw, MOVES)(vectors[-1]))


def _cast(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    v = vectors[-1] * 1.1
    vectors.append(v.astype(_pick(draw, CASTS)).astype(v.dtype) - v * 0.5)


def _norm(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    vectors.append(_pick(draw, NORMS)(vectors[-1]).astype(vectors[-1].dtype))


def _product(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    v = vectors[-1].astype(fuzz.dtype)
    w = fuzz.constant(draw, int(_pick(draw, _LENGTHS)), v.size)
    product = _pick(draw, (lambda: w @ v, lambda: v @ w.T, lambda: v @ fuzz.constant(draw, v.size, w.shape[0])))()
    vectors.append(product + fuzz.constant(draw, w.shape[0]))


def _matrix(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    m = _pick(draw, matrices)
    row = _fit(vectors[-1], m.shape[1]).astype(m.dtype)
    m = _pick(draw, UNARY)(m * row + _fit(vectors[0], m.shape[0]).astype(m.dtype)[:, None])
    matrices.append(_pick(draw, (m, m.T, m[::-1], m.reshape(m.shape[::-1]))))
    vectors.append(_pick(draw, (m[0], m[:, -1], m.T.reshape(-1)[:64])))


def _matrix_product(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    m = matrices[-1]
    w = fuzz.constant(draw, m.shape[1], int(_pick(draw, (1, 5, 16))))
    product = _pick(draw, (lambda: m @ w.astype(m.dtype), lambda: m @ m.T, lambda: (m.T @ m)[:8]))()
    matrices.append(jnp.tanh(product))
    vectors.append(_pick(draw, (product.sum(0), product[:, 0], product.max(1))).astype(fuzz.dtype))


def _cell(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    """The gates of a recurrent cell."""
    h = vectors[-1]
    others = [_fit(_pick(draw, vectors), h.size).astype(h.dtype) for _ in range(3)]
    reset, update = jax.nn.sigmoid(others[0] + h), jax.nn.sigmoid(others[1] * 0.5 + h)
    new = jnp.tanh(others[2] + reset * (h + fuzz.constant(draw, h.size).astype(h.dtype)))
    vectors.append(new + update * (h - new))


def _branch(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    f, g, v = _pick(draw, UNARY), _pick(draw, UNARY), vectors[-1]
    vectors.append(lax.cond(v[0] > 0, lambda v: f(v) * v + 1, lambda v: g(v * 1.5) - v, v).astype(v.dtype))


def _guest(guest: Any, fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    v = vectors[-1]
    vectors.append(guest(draw, v, fuzz.constant(draw, v.size).astype(v.dtype) + 2).astype(v.dtype))


def _guest_of_two(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    for _ in range(2):
        _guest(_pick(draw, GUESTS), fuzz, draw, vectors, matrices)


def _loop(fuzz: Fuzz, draw: Draw, vectors: list[Array], matrices: list[Array]) -> None:
    v, f, trips = vectors[-1].astype(fuzz.dtype), _pick(draw, UNARY), int(draw.integers(1, 4))
    w = fuzz.constant(draw, v.size, v.size)
    if draw.integers(2):
        vectors.append(lax.fori_loop(0, trips, lambda i, c: (jnp.tanh(w @ c) * 0.7 + f(c) * 0.1).astype(v.dtype), v))
        return
    rows = _fit(matrices[-1].reshape(-1), trips * v.size).astype(v.dtype).reshape(trips, v.size)
    last, outs = lax.scan(lambda c, row: ((jnp.tanh(c + row) * 0.9).astype(v.dtype), f(c * row)), v, rows)
    vectors.append(last + outs[-1].astype(last.dtype))


def differences(
    fuzz: Fuzz, transform: Callable[[Any], Any] = bijax.invariant, sizes: Sequence[int] = SIZES
) -> dict[int, int]:
    """Returns, for each size of the batch at which bits differ from those in the largest, how many elements do.

    Args:
        fuzz: The program.
        transform: What is done to it.
        sizes: Sizes of the batch, the largest last.
    """
    with jax.enable_x64(fuzz.dtype == "float64"):
        run = jax.jit(transform(fuzz.batched()))
        arrays = fuzz.arguments()
        draw = np.random.default_rng(fuzz.seed)

        def rows(start: int, size: int) -> list[np.ndarray]:
            parts = zip(arrays, fuzz.axes, strict=False)
            given = (np.moveaxis(a[start : start + size], 0, axis) for a, axis in parts)
            found = jax.tree.leaves(run(*(jnp.asarray(a, fuzz.dtype) for a in given)))
            return [np.moveaxis(np.asarray(a), d, 0) for a, d in zip(found, fuzz.result_axes(), strict=True)]

        expected = rows(0, sizes[-1])
        found = {}
        for size in sizes[:-1]:
            start = int(draw.integers(0, sizes[-1] - size))
            wanted = [a[start : start + size] for a in expected]
            differ = sum(unequal(a, b) for a, b in zip(wanted, rows(start, size), strict=True))
            if differ:
                found[size] = differ
        return found


def unequal(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many elements differ in their bits; a nan equals any nan."""
    return int(unequal_bits(a, b, nan_bits=False).sum())
