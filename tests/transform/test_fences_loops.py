"""The fences hold however XLA puts a program together: in a loop, or in a loop of one trip, which it removes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import normal


def test_a_product_beside_a_quotient_in_loops_of_one_and_of_four_trips() -> None:
    # The derivative of rsqrt divides; its denominator holds the difference of a quotient and a product.
    def unit_gradient(x: jax.Array) -> jax.Array:
        def f(x: jax.Array) -> jax.Array:
            mean = x.mean(-1, keepdims=True)
            return jnp.sin((x - mean) * lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-6)).sum()

        return jax.grad(f)(x)

    run = jax.jit(bijax.invariant(lambda units: lax.map(lambda x: lax.optimization_barrier(unit_gradient(x)), units)))
    units = np.asarray(normal(1, (4, 8, 7, 305)))
    one_by_one = np.concatenate([run(units[i : i + 1]) for i in range(4)])
    assert_bits_equal(one_by_one, run(units))
