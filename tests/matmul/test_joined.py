"""The products of rows by two matrices in one: the bits of the products by themselves, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.ops.matmul.joined import joined_matmul, known_matmul
from bijax.testing import assert_bits_equal

SIZES = ((8, 2048, 16, 1), (33, 300, 512, 1), (130, 64, 7, 3))


def apart(x: jax.Array, w: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = (bijax.matmul(x, a, preferred_element_type=jnp.float32) for a in (w, other))
    return first, second


def joined(x: jax.Array, w: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    n, more = w.shape[1], other.shape[1]
    y = joined_matmul(x, w, other)
    assert y.shape[1] % 64 == 0
    return known_matmul(x, w, y)[:, :n], known_matmul(x, other, y[:, n : n + more])


def both(function: Callable[..., Any], m: int, k: int, n: int, more: int, dtype: str) -> Any:
    """Returns the products of a function, and the gradients of all arrays."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (m, k), (k, n), (k, more), (m, n), (m, more)
    x, w, other, *g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def run(x: jax.Array, w: jax.Array, other: jax.Array) -> Any:
        y, pull = jax.vjp(function, x, w, other)
        return y, pull(tuple(g))

    return jax.jit(run)(*(a.astype(dtype) for a in (x, w, other)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "k", "n", "more"), SIZES)
def test_bits_of_the_products_apart(m: int, k: int, n: int, more: int, dtype: str) -> None:
    assert_bits_equal(both(joined, m, k, n, more, dtype), both(apart, m, k, n, more, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "k", "n", "more"), SIZES)
def test_bits_of_the_products_apart_on_a_gpu(m: int, k: int, n: int, more: int, dtype: str) -> None:
    assert_bits_equal(both(joined, m, k, n, more, dtype), both(apart, m, k, n, more, dtype))


def test_the_next_column_has_other_bits() -> None:
    """The control: the place of the second matrix is compared."""
    x, w = jnp.ones((2, 8)) / 3, jnp.arange(32.0).reshape(8, 4)
    y = joined_matmul(x, w, w[:, :1] + 1)
    assert (y[:, 4] != y[:, 3]).all()
    assert (y[:, 5:] == 0).all()


def test_one_product_on_a_gpu() -> None:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 256), (256, 16), (256, 1))]
    with bijax.lowering_for("sm_90"):
        texts = [jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text() for f in (joined, apart)]
    assert [text.count("custom_call @mosaic_gpu") for text in texts] == [1, 2]
