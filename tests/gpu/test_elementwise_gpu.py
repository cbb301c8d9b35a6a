"""XLA:GPU's element-wise code, which the transform keeps, and row reductions, which it replaces: random programs."""

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.transform.elementwise_programs import batches_that_differ, program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [False, True], ids=["elementwise", "rows"])
@pytest.mark.parametrize("seed", range(32))
def test_random_programs_are_invariant(seed: int, rows: bool) -> None:
    assert not batches_that_differ(bijax.invariant(program(seed, rows)), seed)


def test_some_programs_without_the_transform_are_not() -> None:
    assert any(batches_that_differ(program(seed, True), seed) for seed in range(32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 5, 100_003])
def test_the_logistic_function_is_the_quotient(size: int, dtype: str) -> None:
    x = jnp.linspace(-110, 110, size + 4).at[1:4].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan]))[:size].astype(dtype)

    def quotient(x: jax.Array) -> jax.Array:
        return (1 / (1 + jnp.exp(-x.astype(jnp.float32)))).astype(dtype)

    found, expected = (jax.jit(bijax.invariant(f))(x) for f in (jax.nn.sigmoid, quotient))
    assert_bits_equal(found, expected)
