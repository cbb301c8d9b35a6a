"""A Llama of Flax's own NNX layers, small and with random weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bijax
from bijax.testing import assert_bits_equal
from flax_layers.checkpoint import LlamaConfig
from tests.arrays import on_device
from tests.tiers import full_only
from tests.transform import plain_llama
from tests.transform.compositions import normal
from tests.transform.models import check_control, check_model

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=96,
    intermediate_size=200,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_ids=(2,),
)
TOKENS = on_device(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 9)))
SHIFT = normal(1, 8, 9, CONFIG.hidden_size, scale=0.1)


@functools.cache
def small() -> tuple[Any, Any]:
    return nnx.split(plain_llama.Llama(CONFIG, nnx.Rngs(0)))


def forward(state: Any, shift: jax.Array, tokens: jax.Array) -> jax.Array:
    return nnx.merge(small()[0], state)(tokens, shift)


@pytest.mark.tier("full")
def test_small() -> None:
    check_model(forward, small()[1], SHIFT, TOKENS, sizes=(1,), mode=False)


@pytest.mark.tier("full")
def test_control_small() -> None:
    check_control(forward, small()[1], SHIFT, TOKENS)


@pytest.mark.tier("full")
@pytest.mark.parametrize("fewer", [False, full_only(True)])
def test_padding_behind_the_tokens(fewer: bool) -> None:
    """Tokens that come later do not change a bit, be there more or fewer of them."""
    fn = jax.jit(bijax.invariant(lambda state, tokens: nnx.merge(small()[0], state)(tokens)))
    tokens = fn(small()[1], TOKENS[:2])
    assert_bits_equal(fn(small()[1], TOKENS[:2].at[:, 5:].set(3))[:, :5], tokens[:, :5])
    if fewer:
        assert_bits_equal(fn(small()[1], jnp.pad(TOKENS[:2], ((0, 0), (0, 7))))[:, :9], tokens)
