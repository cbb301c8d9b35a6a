"""Embedding: the look-up, and the order in which its gradient is summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.ops.embed import embed
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device

V, D = 40, 5
DTYPES = ("float32", "bfloat16", "float16")


def tokens(m: int) -> np.ndarray:
    return np.random.default_rng(m).integers(0, V, m).astype(np.int32)


@jax.jit
def gradient(table: jax.Array, names: jax.Array, g: jax.Array) -> jax.Array:
    return jax.vjp(lambda table: embed(table, names), table)[1](g)[0]


def flushed(x: np.ndarray) -> np.ndarray:
    """XLA adds with denormals flushed to zero, going in and coming out."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def emulated(names: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Rows of a token upwards within chunks of 128, chunk sums upwards, in float32."""
    total = np.zeros((V, D), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(names), 128):
            sums = np.zeros((V, D), np.float32)
            for name, row in zip(names[start : start + 128], g[start : start + 128], strict=True):
                sums[name] = flushed(sums[name] + flushed(row.astype(np.float32)))
            total = flushed(total + sums)
    return total


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_the_stated_sum(dtype: str) -> None:
    table = jnp.zeros((V, D), dtype)
    for m in (0, 1, 127, 128, 129, 300):
        names = tokens(m)
        for name, data in hostile_rows(0, (m, D), dtype).items():
            expected = jnp.asarray(emulated(names, data)).astype(dtype)
            actual = gradient(table, names, data)
            # The sign and payload of a nan are the processor's.
            same = np.isnan(np.asarray(actual, np.float32)) & np.isnan(np.asarray(expected, np.float32))
            assert_bits_equal(jnp.where(same, 0, actual), jnp.where(same, 0, expected), err_msg=f"{m} {name}")


def test_gradient_takes_micro_batches_and_vmap() -> None:
    names, g = tokens(384), np.random.default_rng(0).standard_normal((384, D)).astype(np.float32)
    table = jnp.zeros((V, D))
    whole = gradient(table, names, g)
    first, second, third = (gradient(table, names[i : i + 128], g[i : i + 128]) for i in (0, 128, 256))
    assert_bits_equal((first + second) + third, whole)
    mapped = jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0)))(table, names.reshape(3, 128), g.reshape(3, 128, D))
    assert_bits_equal(mapped, jnp.stack([first, second, third]))


def test_stock_gradient_does_not_take_micro_batches() -> None:
    """The control."""
    names, g = tokens(384), np.random.default_rng(0).standard_normal((384, D)).astype(np.float32)

    def stock(names: np.ndarray, g: np.ndarray) -> np.ndarray:
        return np.asarray(jax.vjp(lambda table: table[names], jnp.zeros((V, D)))[1](g)[0])

    first, second, third = (stock(names[i : i + 128], g[i : i + 128]) for i in (0, 128, 256))
    assert (stock(names, g).view(np.uint32) != ((first + second) + third).view(np.uint32)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_look_up(dtype: str) -> None:
    table = on_device(hostile_rows(0, (V, D), dtype)["wide"])
    names = tokens(6).reshape(2, 3)
    assert_bits_equal(embed(table, names), np.asarray(table)[names])
    assert_bits_equal(jax.jit(jax.vmap(embed, in_axes=(None, 1), out_axes=1))(table, names), np.asarray(table)[names])


def test_outside_the_table() -> None:
    names = np.array([1, V, -1, 2**31 - 1])
    assert np.isnan(embed(jnp.zeros((V, D)), names)).all(axis=1).tolist() == [False, True, True, True]
    g = gradient(jnp.zeros((V, D)), jnp.asarray(names), jnp.ones((4, D)))
    assert np.flatnonzero(np.asarray(g).any(axis=1)).tolist() == [1]


def test_errors() -> None:
    with pytest.raises(TypeError, match="tokens must hold integers, got float32"):
        embed(jnp.zeros((V, D)), jnp.zeros(3))
    with pytest.raises(TypeError, match="table must have one of the dtypes"):
        embed(jnp.zeros((V, D), jnp.int32), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"two dimensions \(tokens, features\), got float32\[5\]"):
        embed(jnp.zeros(5), jnp.zeros(3, jnp.int32))
    with pytest.raises((UnsupportedError, TypeError)):
        jax.jvp(lambda table: embed(table, jnp.array([0])), (jnp.zeros((V, D)),), (jnp.ones((V, D)),))
