"""Programs that are compiled without optimizations, after others with them, have equal rows among each other."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal

R = np.random.default_rng(0)
W, V = (jnp.asarray(R.standard_normal(shape).astype(np.float32)) for shape in ((40, 24), (24, 7)))
X = jnp.asarray(R.standard_normal((33, 40)).astype(np.float32))


def network(x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jax.nn.gelu(x @ W) @ V)


def library(x: jax.Array) -> jax.Array:
    return bijax.matmul(x, W)


@pytest.fixture
def compiled_before() -> Iterator[None]:
    """Products of 33 and 3 rows are compared with optimizations; the setting then changes."""
    for function in (network, library):
        for rows in (33, 3):
            jax.jit(bijax.invariant(function))(X[:rows])
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compiled_before")
@pytest.mark.parametrize("function", [network, library])
def test_rows(function: Callable[[jax.Array], jax.Array]) -> None:
    run = jax.jit(bijax.invariant(lambda x: function(x)))
    whole = run(X)
    for rows in (1, 2, 3, 8):
        assert_bits_equal(run(X[:rows]), whole[:rows])
