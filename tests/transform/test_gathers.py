"""Gathers of single elements next to their own indices, of which XLA:CPU of jaxlib 0.12 makes wrong code."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "moved by one": lambda x, i: x[i] + jnp.concatenate([i[1:], i[:1]]),
    "scaled": lambda x, i: x[i] * jnp.concatenate([i[1:], jnp.zeros(1, int)]).astype(jnp.float32),
    "chosen": lambda x, i: jnp.where(jnp.concatenate([i[1:], i[:1]]) == i, jnp.take(x, i, mode="clip"), 0),
}


@pytest.mark.tier("fault")
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_do_not_depend_on_the_number_of_indices(name: str) -> None:
    """Against NumPy's exact gather; plain `jax.jit` differs from 33 indices on with jaxlib 0.12.0.1."""
    program = PROGRAMS[name]
    rng = np.random.default_rng(0)
    for count in (33, 65):
        x = on_device(rng.integers(0, 9, count), jnp.float32)
        i = jnp.asarray(np.sort(rng.integers(0, count, count)), jnp.int32)
        with jax.disable_jit():
            expected = program(x, i)
        assert_bits_equal(jax.jit(bijax.invariant(program))(x, i), expected, err_msg=f"{count} indices")


def test_gathers_of_rows_are_fused_as_before() -> None:
    def barriers(table: jax.Array) -> int:
        lowered = jax.jit(bijax.invariant(lambda x, i: x[i])).lower(table, jnp.arange(33))
        return lowered.as_text().count("optimization_barrier")

    assert barriers(jnp.zeros((40, 8))) + 1 == barriers(jnp.zeros(40))
