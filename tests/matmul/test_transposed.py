"""Weights that are transposed in memory some rows at a time, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.matmul.cpu.forms import transposed
from tests.arrays import on_device


@pytest.mark.parametrize("shape", [(3, 5), (64, 1 << 15), (300, 4096)])
def test_values(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(0).standard_normal(shape, np.float32)
    assert_bits_equal(jax.jit(transposed)(w), w.T)


def test_products_with_few_long_rows_of_weights() -> None:
    """As in the gradient of a layer that makes many columns of few: it could not be compiled."""
    x, w = (
        on_device(np.random.default_rng(i).standard_normal((n, 1 << 15)), jnp.float32) for i, n in enumerate((5, 64))
    )
    product = jax.jit(lambda x: bijax.matmul(x, w, transpose_w=True))
    assert_bits_equal(product(x[2:3]), product(x)[2:3])
