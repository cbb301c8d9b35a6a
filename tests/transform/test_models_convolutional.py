"""A convolutional ResNet: batch norm with frozen statistics keeps a row's bits; with live ones, rows depend on rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.transform.compositions import normal
from tests.transform.models import check_control, check_model

X = normal(1, 8, 8, 8, 3)


class Block(nn.Module):
    features: int
    strides: int
    live: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.live)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        return nn.relu(y + norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x)))


class ResNet(nn.Module):
    live: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(Block(20, 1, self.live)(x), (2, 2), (2, 2))
        x = nn.avg_pool(Block(33, 2, self.live)(x), (2, 2), (1, 1))
        return nn.Dense(10)(x.mean((1, 2)))


@functools.cache
def variables() -> Any:
    return jax.jit(ResNet().init)(jax.random.key(0), X[:1])


def frozen(variables: Any, x: jax.Array) -> jax.Array:
    return ResNet().apply(variables, x)


def live(variables: Any, x: jax.Array) -> jax.Array:
    return ResNet(live=True).apply(variables, x, mutable=["batch_stats"])[0]


@pytest.mark.tier("full")
def test_frozen_statistics() -> None:
    check_model(frozen, variables(), X)


@pytest.mark.tier("full")
def test_control_frozen_statistics() -> None:
    check_control(frozen, variables(), X)


@pytest.mark.tier("full")
def test_live_statistics_depend_on_the_batch() -> None:
    """Rows depend on each other by definition; the bits still do not depend on anything else."""
    fn = jax.jit(bijax.invariant(live))
    whole = fn(variables(), X)
    assert (bits(fn(variables(), X[:5])) != bits(whole[:5])).any()
    twice = jax.jit(jax.vmap(bijax.invariant(live), (None, 0)))(variables(), jnp.stack([X, jnp.full_like(X, jnp.nan)]))
    assert_bits_equal(twice[0], whole)
