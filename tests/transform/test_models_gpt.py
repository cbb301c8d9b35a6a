"""A GPT in plain JAX: tied embedding, scan over the layers, each of them rematerialised."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.transform.compositions import normal
from tests.transform.models import check_control, check_model

VOCAB, LENGTH, WIDTH, HEADS, LAYERS = 300, 9, 76, 4, 2
PARAMS = {
    "embedding": normal(1, VOCAB, WIDTH, scale=0.1),
    "positions": normal(2, LENGTH, WIDTH, scale=0.1),
    "layers": {
        "qkv": normal(3, LAYERS, WIDTH, 3 * WIDTH, scale=0.1),
        "out": normal(4, LAYERS, WIDTH, WIDTH, scale=0.1),
        "up": normal(5, LAYERS, WIDTH, 300, scale=0.1),
        "down": normal(6, LAYERS, 300, WIDTH, scale=0.1),
        "norms": 1 + normal(7, LAYERS, 2, WIDTH, scale=0.1),
    },
}
TOKENS = on_device(np.random.default_rng(8).integers(0, VOCAB, (8, LENGTH)))
SHIFT = normal(9, 8, LENGTH, WIDTH, scale=0.1)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale


@jax.checkpoint
def layer(x: jax.Array, p: Any) -> jax.Array:
    q, k, v = jnp.split(norm(x, p["norms"][0]) @ p["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["norms"][1]) @ p["up"]) @ p["down"]


def gpt(params: Any, shift: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits; `shift` is added to the embedded tokens, for its gradient."""
    x = params["embedding"][tokens] + params["positions"] + shift
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return x @ params["embedding"].T


def loss(params: Any, shift: jax.Array, tokens: jax.Array) -> jax.Array:
    """A loss for each sequence."""
    log_probs = jax.nn.log_softmax(gpt(params, shift, tokens)[:, :-1])
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean((1, 2))


@pytest.mark.tier("full")
def test_gpt() -> None:
    check_model(gpt, PARAMS, SHIFT, TOKENS)


@pytest.mark.tier("full")
def test_control_gpt() -> None:
    check_control(gpt, PARAMS, SHIFT, TOKENS)


@pytest.mark.tier("full")
def test_gradients_of_examples() -> None:
    """A gradient for each example, by vmap of grad, is that of the example alone."""
    one = bijax.invariant(jax.grad(lambda p, s, t: loss(p, s[None], t[None])[0]))
    several = jax.jit(jax.vmap(one, (None, 0, 0)))(PARAMS, SHIFT[:3], TOKENS[:3])
    alone = jax.jit(one)(PARAMS, SHIFT[1], TOKENS[1])
    jax.tree.map(lambda a, b: assert_bits_equal(a[1], b), several, alone)


@pytest.mark.tier("full")
def test_gradients_by_accumulation() -> None:
    gradient = bijax.accumulate_gradients(lambda p, s, t: loss(p, s, t).mean(), unit=4)
    whole = jax.jit(gradient)(PARAMS, SHIFT, TOKENS)
    add = jax.jit(gradient.add)
    total = gradient.start(PARAMS, SHIFT[:4], TOKENS[:4])
    for part in (slice(0, 4), slice(4, 8)):
        total = add(total, PARAMS, SHIFT[part], TOKENS[part])
    jax.tree.map(assert_bits_equal, total.value_and_grad(), whole)
