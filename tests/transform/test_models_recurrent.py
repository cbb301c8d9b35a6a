"""Recurrent networks of Flax Linen and Flax NNX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bijax
from bijax.testing import assert_batch_invariant
from tests.transform.compositions import normal
from tests.transform.models import NEIGHBOURS, SIZES, check_control, check_model

X = normal(1, 8, 9, 130)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.RNN(nn.OptimizedLSTMCell(77))(x)
        return nn.Dense(5)(nn.RNN(nn.GRUCell(33))(x)[:, -1])


@functools.cache
def linen_params() -> Any:
    return jax.jit(Linen().init)(jax.random.key(0), X[:1])


def linen(params: Any, x: jax.Array) -> jax.Array:
    return Linen().apply(params, x)


@functools.cache
def lstm() -> tuple[Any, Any]:
    return nnx.split(nnx.RNN(nnx.LSTMCell(130, 77, rngs=nnx.Rngs(0)), rngs=False))


def nnx_with_dx(state: Any, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `with_dx`; with Flax's own gradient, since a module that scans cannot be merged inside one of JAX's."""
    model, zeros = nnx.merge(lstm()[0], state), jnp.zeros((len(x), 77))

    def product(model: nnx.RNN, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = model(x, initial_carry=(zeros, zeros))
        return (y * g).sum(), y

    dx, y = nnx.grad(product, argnums=1, has_aux=True)(model, x)
    return y, dx


@pytest.mark.tier("full")
def test_linen() -> None:
    check_model(linen, linen_params(), X)


@pytest.mark.tier("full")
def test_nnx() -> None:
    args = (lstm()[1], X, normal(2, 8, 9, 77))
    fn = bijax.invariant(nnx_with_dx)
    assert not bijax.audit(fn, *args).variant
    assert_batch_invariant(fn, *args, batch_axes=(None, 0, 0), batch_sizes=SIZES, neighbours=NEIGHBOURS, modes=("jit",))


@pytest.mark.tier("full")
def test_control_linen() -> None:
    check_control(linen, linen_params(), X)
