"""Code of other libraries on a GPU, callbacks among it, which JAX lowers for a platform that is there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.transform.foreign_programs import FROM_CALLBACKS, FUNCTIONS, X, checked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    function = jax.jit(bijax.invariant(FUNCTIONS[name]))
    whole = function(X)
    for size in (1, 5, 16):
        assert_bits_equal(function(X[:size]), whole[:size])
    np.testing.assert_allclose(whole, FUNCTIONS[name](X), rtol=2e-2, atol=1e-2)  # plain JAX multiplies in TF32


def test_the_check_raises() -> None:
    function = jax.jit(bijax.invariant(checked))
    function(X)
    with pytest.raises(FROM_CALLBACKS, match="a nan"):
        jax.block_until_ready(function(jnp.asarray(X).at[3, 3].set(jnp.nan)))


def test_a_library_of_sparse_products_is_not_called() -> None:
    for name in ("COO", "CSR"):
        text = jax.jit(bijax.invariant(FUNCTIONS[name])).lower(X).as_text()
        assert "sparse" not in text
        assert "sparse" in jax.jit(FUNCTIONS[name]).lower(X).as_text()
