"""The convolution with the lengths of heads, and the gated norm of heads: the operations apart, gradients, vmap."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops.delta_rule.conv_heads import conv_heads, conv_heads_extend
from bijax.ops.norm.gated import gated_heads
from bijax.testing import assert_bits_equal
from pallas_kernels.causal_conv.heads import Heads

HEADS: Final = Heads(keys=1, values=2, width=4, value_width=6, eps=1e-6)
COLUMNS: Final = HEADS.channels + 12


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def apart(x: jax.Array, weight: jax.Array) -> Any:
    y = bijax.causal_conv1d(x[..., : HEADS.channels], weight, activation="silu")
    query, key, value = jnp.split(y, [4, 8], axis=-1)
    query, key = (bijax.l2_norm(a.reshape(*a.shape[:2], 1, 4)) for a in (query, key))
    return query, key, value.reshape(*value.shape[:2], 2, 6)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(assert_bits_equal, found, expected)


def test_bits_and_gradients_of_the_operations_apart() -> None:
    x, weight = normal(0, 2, 9, COLUMNS), normal(1, HEADS.channels, 4)

    def run(function: Any) -> Any:
        y, pull = jax.vjp(function, x, weight)
        return y, pull(jax.tree.map(jnp.sin, y))

    together = jax.jit(lambda: run(lambda x, weight: conv_heads(x, weight, HEADS)))()
    same(together, jax.jit(lambda: run(apart))())
    assert not together[1][0][..., HEADS.channels :].any()
    same(jax.jit(conv_heads, static_argnums=2)(x, weight, HEADS), together[0])


def test_parts() -> None:
    x, weight = normal(0, 2, 9, COLUMNS), normal(1, HEADS.channels, 4)
    state, found = jnp.zeros((2, 5, HEADS.channels)), []
    for start in range(0, 9, 3):
        part, state = conv_heads_extend(x[:, start : start + 3], weight, HEADS, state=state, start=[start] * 2)
        found.append(part)
    same(jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *found), conv_heads(x, weight, HEADS))


def test_more_axes() -> None:
    x, weights, scales = normal(0, 3, 2, 9, COLUMNS), normal(1, 3, HEADS.channels, 4), normal(2, 3, 6)
    y, state, start = normal(3, 3, 2, 9, 2, 6), normal(4, 3, 2, 5, HEADS.channels), jnp.array([[0, 1], [2, 0], [7, 3]])

    def one_by_one(function: Any, *arrays: Any) -> Any:
        return jax.tree.map(lambda *each: jnp.stack(each), *(function(*(a[i] for a in arrays)) for i in range(3)))

    def shared(x: Any) -> Any:
        return conv_heads(x, weights[0], HEADS)

    def own(x: Any, weight: Any) -> Any:
        return conv_heads(x, weight, HEADS)

    def extend(x: Any, state: Any, start: Any) -> Any:
        return conv_heads_extend(x[:, :2], weights[0], HEADS, state=state, start=start)

    def gated(y: Any, x: Any) -> Any:
        return gated_heads(y, x, scales[0], eps=1e-6)

    def own_gated(y: Any, x: Any, scale: Any) -> Any:
        return gated_heads(y, x, scale, eps=1e-6)

    for function, *arrays in (
        (shared, x), (own, x, weights), (extend, x, state, start), (gated, y, x), (own_gated, y, x, scales),
    ):  # fmt: skip
        same(jax.vmap(function)(*arrays), one_by_one(function, *arrays))


def test_gates_are_the_last_columns() -> None:
    y, x, scale = normal(0, 2, 9, 2, 6), normal(1, 2, 9, COLUMNS), normal(2, 6)

    def run(function: Any) -> Any:
        found, pull = jax.vjp(function, y, x, scale)
        return found, pull(jnp.sin(found))

    def by_copy(y: Any, x: Any, scale: Any) -> Any:
        return bijax.gated_rms_norm(y, x[..., -12:].reshape(y.shape), scale, eps=1e-5)

    together = jax.jit(lambda: run(lambda y, x, scale: gated_heads(y, x, scale, eps=1e-5)))()
    same(together, jax.jit(lambda: run(by_copy))())


def test_without_tokens() -> None:
    weight = normal(0, HEADS.channels, 4)
    for batch, tokens in ((0, 3), (2, 0)):
        x = jnp.zeros((batch, tokens, COLUMNS))
        assert [a.shape for a in conv_heads(x, weight, HEADS)] == [
            (batch, tokens, n, w) for n, w in ((1, 4), (1, 4), (2, 6))
        ]
        y = jnp.zeros((batch, tokens, 2, 6))
        assert gated_heads(y, x, None, eps=1e-6).shape == y.shape


def test_errors() -> None:
    x, weight = normal(0, 2, 9, COLUMNS), normal(1, HEADS.channels, 4)
    with pytest.raises(ValueError, match="x must have at least 20 columns for its heads"):
        conv_heads(x[..., :19], weight, HEADS)
    with pytest.raises(ValueError, match=r"weight must have the shape \(C, W\) with C=20"):
        conv_heads(x, weight[:19], HEADS)
    with pytest.raises(ValueError, match="gate must have the rows of x and at least 12 columns"):
        gated_heads(normal(2, 2, 9, 2, 6), x[..., :11], None, eps=1e-6)
