"""SmolLM2 of Flax's own NNX layers, with its real weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bijax
from bijax.testing import assert_bits_equal, bits
from flax_layers.checkpoint import load_checkpoint, smollm2_path
from tests.arrays import on_device
from tests.layers import reference_llama
from tests.transform import plain_llama


@pytest.mark.tier("full")
@pytest.mark.parametrize("layers", [1, 5, 30])
def test_smollm2(layers: int) -> None:
    checkpoint = load_checkpoint(smollm2_path())
    config = dataclasses.replace(checkpoint.config, num_layers=layers)
    graph, state = nnx.split(plain_llama.load(config, checkpoint.weights))

    def logits(state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens)

    requested = checkpoint.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )[-12:]
    others = np.random.default_rng(2).integers(0, config.vocab_size, (4, len(requested)))
    alone = jnp.asarray([requested])
    batch = on_device(np.concatenate([others[:2], alone, others[2:]]))

    fn = jax.jit(bijax.invariant(logits))
    one = fn(state, alone)
    assert_bits_equal(fn(state, batch)[2], one[0])
    assert_bits_equal(fn(state, jnp.roll(batch, 2, axis=0))[4], one[0])
    assert not bijax.audit(fn, state, batch).variant
    expected = reference_llama.logits(checkpoint.weights, config, list(map(int, requested)))
    assert np.abs(np.asarray(one[0]) - expected).max() < 2e-4

    plain = jax.jit(logits)
    assert (bits(plain(state, batch)[2]) != bits(plain(state, alone)[0])).any()
