"""Models of Equinox, with its own transforms."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.tiers import full_only
from tests.transform.compositions import normal
from tests.transform.models import check_control, check_model

X = normal(1, 8, 7, 76)


class Block(eqx.Module):
    attention: Any
    norm: Any
    mlp: Any

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, 76, key=first)
        self.norm = eqx.nn.LayerNorm(76)
        self.mlp = eqx.nn.MLP(76, 76, 300, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


@functools.cache
def block() -> tuple[Any, Any]:
    return eqx.partition(Block(jax.random.key(0)), eqx.is_array)


def forward(arrays: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(eqx.combine(arrays, block()[1]))(x)


@pytest.mark.tier("full")
def test_block() -> None:
    check_model(forward, block()[0], X)


@pytest.mark.tier("full")
def test_control_block() -> None:
    check_control(forward, block()[0], X)


@pytest.mark.tier("full")
def test_filtered_transforms() -> None:
    model = eqx.combine(*block())

    @eqx.filter_jit
    def rows(model: Block, x: jax.Array) -> jax.Array:
        return bijax.invariant(eqx.filter_vmap(model))(x)

    assert_bits_equal(rows(model, X[:3]), rows(model, X)[:3])


@pytest.mark.tier("full")
@pytest.mark.parametrize("depth", [0, full_only(1)])
def test_gradient_of_a_module(depth: int) -> None:
    model = eqx.nn.MLP(76, 5, 300, depth, key=jax.random.key(1))

    @bijax.invariant
    @eqx.filter_jit
    def gradient(model: Any, x: jax.Array, weights: jax.Array) -> Any:
        return eqx.filter_grad(lambda m: ((jax.vmap(m)(x) ** 2).sum(-1) * weights).sum())(model)

    x, weights = X[:, 0], jnp.ones(8)
    filled = gradient(model, jnp.pad(x, ((0, 9), (0, 0))), jnp.pad(weights, (0, 9)))
    assert_bits_equal(filled.layers[0].weight, gradient(model, x, weights).layers[0].weight)
