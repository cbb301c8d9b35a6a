"""Maxima and minima of two numbers have the same bits in every shape, however their loops are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.lax.extremes import maximum, minimum
from bijax.testing import bits
from pallas_kernels.parts.xla.total_order import choose_of_two
from tests.transform.special_values import special_values

ROWS = 33
LENGTHS = (8, 16, 23)
"""Written as one loop for each dimension, and the others as one loop over all elements."""


def values(columns: int, seed: int) -> np.ndarray:
    known = special_values("float32")
    return known[np.random.default_rng(seed).integers(len(known), size=(ROWS, columns))]


@jax.jit
def both(pairs: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
    return [(maximum(x, y), minimum(x, jnp.float32(0))) for x, y in pairs]


@jax.jit
def of_vectors(pairs: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
    return [(choose_of_two(x, y, smallest=False), choose_of_two(x, jnp.zeros_like(x), smallest=True)) for x, y in pairs]


@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_loops_over_short_rows_have_the_bits_of_vectors(rows: int) -> None:
    pairs = [(values(n, 0), values(n, 1)) for n in LENGTHS]
    expected = of_vectors([(x.reshape(-1), y.reshape(-1)) for x, y in pairs])
    actual = both([(x[-rows:], y[-rows:]) for x, y in pairs])
    for n, a, e in zip(LENGTHS, actual, expected, strict=True):
        for found, wanted in zip(a, e, strict=True):
            np.testing.assert_array_equal(bits(found), bits(wanted).reshape(ROWS, n)[-rows:])


def test_short_rows_are_one_loop() -> None:
    def shapes(columns: int) -> set[tuple[int, ...]]:
        jaxpr = jax.make_jaxpr(maximum)(values(columns, 0), values(columns, 1))
        return {e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "select_n"}

    assert [shapes(n) for n in LENGTHS] == [{(ROWS, 8)}, {(ROWS * 16,)}, {(ROWS * 23,)}]


def test_a_maximum_with_minus_infinity_is_left_out() -> None:
    x = jnp.asarray(values(16, 0))

    def lowered(limit: float) -> jax.stages.Lowered:
        return jax.jit(bijax.invariant(lambda x: jnp.maximum(x, limit))).lower(x)

    assert "select" in lowered(0.0).as_text()
    assert "select" not in lowered(-jnp.inf).as_text()
    np.testing.assert_array_equal(bits(lowered(-jnp.inf).compile()(x)), bits(maximum(x, jnp.full_like(x, -jnp.inf))))
