"""The programs with which users reported that bits depend on the batch."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.transform.compositions import normal

LAYERS = [normal(1, 300, 64, scale=0.1), normal(2, 64, 77, scale=0.2), normal(3, 77, 3)]
SIZES = (1, 33, 10000)
X = normal(4, SIZES[-1], 300)


def mlp(x: jax.Array) -> jax.Array:
    """One example, of shape (300,)."""
    for w in LAYERS:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.tier("fault")
def test_mlp_under_vmap() -> None:
    fn = jax.jit(jax.vmap(bijax.invariant(mlp)))
    whole = fn(X)
    for size in SIZES[:-1]:
        assert_bits_equal(fn(X[:size]), whole[:size])
        assert_bits_equal(fn(X[-size:]), whole[-size:])


@pytest.mark.tier("full")
def test_mlp_under_vmap_in_the_mode() -> None:
    whole = jax.jit(jax.vmap(bijax.invariant(mlp)))(X)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(jax.jit(jax.vmap(mlp))(X[:8]), whole[:8])


def test_control_mlp_under_vmap() -> None:
    # Where an example stands matters on some processors, on others the size of the batch alone.
    fn = jax.jit(jax.vmap(mlp))
    whole = fn(X)
    cuts = [(start, size) for size in SIZES[:-1] for start in (0, 1, 37)]
    assert any((bits(fn(X[i : i + size])) != bits(whole[i : i + size])).any() for i, size in cuts)


@pytest.mark.tier("fault")
def test_map_against_vmap() -> None:
    x = X[:33]
    one_by_one = jax.jit(lambda x: lax.map(bijax.invariant(mlp), x))(x)
    assert_bits_equal(one_by_one, jax.jit(jax.vmap(bijax.invariant(mlp)))(x))
    assert_bits_equal(one_by_one, jax.jit(bijax.invariant(lambda x: lax.map(mlp, x, batch_size=8)))(x))
    assert_bits_equal(one_by_one[4], bijax.invariant(mlp)(x[4]))


def test_control_map_against_vmap() -> None:
    x = X[:33]
    assert (bits(jax.jit(lambda x: lax.map(mlp, x))(x)) != bits(jax.jit(jax.vmap(mlp))(x))).any()


@pytest.mark.tier("fault")
@pytest.mark.parametrize("rows", [1, 5])
def test_dot_general_with_zero_padding(rows: int) -> None:
    w, x = normal(5, 3, 300, 77), normal(6, 3, rows, 300)

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))

    fn = jax.jit(bijax.invariant(dot))
    alone = fn(x, w)
    more_rows = fn(jnp.pad(x, ((0, 0), (0, 11), (0, 0))), w)
    assert_bits_equal(more_rows[:, :rows], alone)
    more_columns = fn(x, jnp.pad(w, ((0, 0), (0, 0), (0, 19))))
    assert_bits_equal(more_columns[..., :77], alone)
    more_products = fn(jnp.pad(x, ((0, 2), (0, 0), (0, 0))), jnp.pad(w, ((0, 2), (0, 0), (0, 0))))
    assert_bits_equal(more_products[:3], alone)


def test_control_dot_general_with_zero_padding() -> None:
    w, x = normal(5, 512, 77), normal(6, 1, 512)
    dot = jax.jit(jnp.dot)
    assert (bits(dot(jnp.pad(x, ((0, 11), (0, 0))), w)[:1]) != bits(dot(x, w))).any()
