"""Transformers of Flax Linen and Flax NNX, with dropout off and on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.transform.compositions import normal
from tests.transform.models import check_control, check_model

WIDTH, HIDDEN, HEADS = 76, 300, 4
X = normal(1, 8, 7, WIDTH)


class LinenBlock(nn.Module):
    deterministic: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = functools.partial(nn.Dropout, 0.25, deterministic=self.deterministic)
        attention = nn.MultiHeadDotProductAttention(
            HEADS, dropout_rate=0.25, broadcast_dropout=False, deterministic=self.deterministic
        )
        y = nn.LayerNorm()(x)
        x = x + drop()(attention(y, y, mask=nn.make_causal_mask(x[..., 0])))
        y = nn.gelu(nn.Dense(HIDDEN)(nn.RMSNorm()(x)))
        return x + drop()(nn.Dense(WIDTH)(y))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, deterministic: bool = True) -> None:
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.25, deterministic=deterministic, decode=False, rngs=rngs
        )
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)])
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, deterministic=deterministic, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, mask=nnx.make_causal_mask(x[..., 0])))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


@functools.cache
def linen_params() -> Any:
    return jax.jit(LinenBlock().init)(jax.random.key(0), X[:1])


def linen(params: Any, x: jax.Array) -> jax.Array:
    return LinenBlock().apply(params, x)


def linen_dropout(params: Any, x: jax.Array) -> jax.Array:
    return LinenBlock(deterministic=False).apply(params, x, rngs={"dropout": jax.random.key(7)})


@functools.cache
def nnx_block(deterministic: bool = True) -> tuple[Any, Any]:
    return nnx.split(NnxBlock(nnx.Rngs(0, dropout=7), deterministic=deterministic))


def nnx_forward(state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(nnx_block()[0], state)(x)


def nnx_dropout(state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(nnx_block(False)[0], state)(x)


@pytest.mark.tier("full")
def test_linen() -> None:
    check_model(linen, linen_params(), X)


@pytest.mark.tier("full")
def test_nnx() -> None:
    check_model(nnx_forward, nnx_block()[1], X)


@pytest.mark.tier("full")
def test_control_linen() -> None:
    check_control(linen, linen_params(), X)


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_dropout(kind: str) -> None:
    """The same key gives the same bits; a row at its place keeps them, whatever stands after it.

    Which numbers are drawn for a row follows from its place in the batch, so a row that moves gets others.
    """
    model, params = (linen_dropout, linen_params()) if kind == "linen" else (nnx_dropout, nnx_block(False)[1])
    fn = jax.jit(bijax.invariant(model))
    whole = fn(params, X)
    assert_bits_equal(fn(params, X), whole)
    assert_bits_equal(fn(params, X[:1]), whole[:1])
    assert_bits_equal(fn(params, X.at[3:].set(jnp.nan))[:3], whole[:3])
    assert (bits(whole) != bits(fn(params, jnp.flip(X, 0))[::-1])).any()
