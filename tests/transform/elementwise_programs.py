"""Random programs of element-wise operations, broadcasts and row reductions, and what their batches change."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.arrays import on_device

Program = Callable[[jax.Array, jax.Array], jax.Array]

UNARY: list[Callable[[jax.Array], jax.Array]] = [
    jnp.tanh,
    jnp.exp,
    jax.nn.sigmoid,
    jax.nn.gelu,
    jax.nn.silu,
    jnp.square,
    jnp.sin,
    jnp.cbrt,
    lax.erf,
    lambda x: lax.rsqrt(jnp.abs(x) + 0.1),
    lambda x: jnp.sqrt(jnp.abs(x)),
    lambda x: jnp.log1p(jnp.abs(x)),
    lambda x: jnp.power(jnp.abs(x) + 0.1, 1.7),
    lambda x: x**3,
    lambda x: x * 0.3,
    lambda x: x / 3,
    lambda x: 1 / (1 + jnp.abs(x)),
    lambda x: jnp.where(x > 0, x, x * 0.01),
    lambda x: jnp.clip(x, -1, 1) * 2 + 1.7,
]

BINARY: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda a, b: a * b + a,
    lambda a, b: a * b - b * b,
    lambda a, b: a / (1 + jnp.abs(b)),
    lambda a, b: jnp.where(a > b, a * 2 + b, b * 3 - a),
    lambda a, b: a * 0.5 + b * 0.25,
    lambda a, b: jnp.maximum(a, b) - b,
]

BROADCAST: list[Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = [
    lambda a, x, w: a * w + w,
    lambda a, x, w: a * a[:, :1] + a,
    lambda a, x, w: a / (jnp.abs(w) + 1),
    lambda a, x, w: a * x[:, -1:] - w,
]

ROWS: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda a, w: a - a.mean(-1, keepdims=True),
    lambda a, w: jax.nn.softmax(a, -1),
    lambda a, w: a * lax.rsqrt((a * a).mean(-1, keepdims=True) + 1e-6) * w,
    lambda a, w: a + a.max(-1, keepdims=True),
]


def program(seed: int, rows: bool) -> Program:
    """A random program; `rows` says whether rows may be reduced."""
    kinds = ("unary", "binary", "broadcast", "rows")[: 3 + rows]
    steps = np.random.default_rng(seed).integers(0, 1 << 30, (11, 4))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        values = [x, x * w]
        for kind, which, first, second in steps.tolist():
            a, b = values[first % len(values)], values[second % len(values)]
            match kinds[kind % len(kinds)]:
                case "unary":
                    values.append(UNARY[which % len(UNARY)](a))
                case "binary":
                    values.append(BINARY[which % len(BINARY)](a, b))
                case "broadcast":
                    values.append(BROADCAST[which % len(BROADCAST)](a, x, w))
                case _:
                    values.append(ROWS[which % len(ROWS)](a, w))
        return values[-1] + values[-2] * values[len(values) // 2]

    return run


FEW: Final = (1, 3, 17)
SIZES: Final = (1, 2, 3, 8, 17, 31)
"""Rows that are compared with 64."""


def batches_that_differ(run: Program, seed: int, sizes: Sequence[int] = SIZES) -> list[tuple[int, int]]:
    rng = np.random.default_rng(1000 + seed)
    columns, dtype = rng.choice([1, 7, 33, 77, 100, 128, 576]), [jnp.float32, jnp.bfloat16, jnp.float16][seed % 3]
    x = on_device(rng.standard_normal((64, columns)) * 2, dtype)
    w = on_device(rng.standard_normal(columns), dtype)
    compiled = jax.jit(run)

    def bits(x: Any) -> np.ndarray:
        array = np.asarray(compiled(x, w))
        return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])

    expected = bits(x)
    # A loop's body is compiled in another way, and a loop of one trip in a third.
    loop = jax.jit(lambda x, w: lax.map(lambda part: run(part, w), x))
    for parts in (1, 8):
        looped = np.asarray(loop(x.reshape(parts, 64 // parts, -1), w)).view(expected.dtype)
        if (looped.reshape(expected.shape) != expected).any():
            return [(64 // parts, -1)]
    cases = [(rows, int(rng.integers(0, 64 - rows))) for rows in sizes]
    return [(m, start) for m, start in cases if (bits(x[start : start + m]) != expected[start : start + m]).any()]
