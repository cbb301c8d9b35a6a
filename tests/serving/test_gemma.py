"""gemma's `Sampler`, unchanged, under bijax: the bits of a prompt alone and among others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gemma", reason="needs gemma, the extra `gemma`")

from gemma import gm

import bijax

# Of one length: in a batch gemma moves the cache of a shorter prompt by the length of the longest one.
PROMPTS = ["hello world ! My", "My name is Morgane", "Hello there ! hello", "input string is world"]
EOS = 1


class Model(gm.testing.DummyGemma):  # type: ignore[misc]
    """gemma's model for tests, with layers large enough that plain JAX's bits depend on the batch."""

    config: Any = dataclasses.replace(
        gm.testing.DummyGemma.config,
        num_embed=14,
        embed_dim=192,
        hidden_dim=577,
        attention_types=gm.testing.DummyGemma.config.attention_types * 2,
    )


def make_sampler() -> Any:
    model = Model(dtype=jnp.float32)
    params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    return gm.text.Sampler(
        model=model,
        params=params,
        tokenizer=gm.testing.DummyTokenizer(),
        forbidden_tokens=(EOS,),  # so that all sequences have the same length
        cache_length=32,
        max_out_length=8,
        pad_length=8,
    )


def differing(sampler: Any) -> int:
    """Returns how many numbers of the caches, keys and values of all tokens, differ alone and in a batch."""
    together = sampler.sample(PROMPTS, rng=0, return_state=True)
    found = 0
    for index, prompt in enumerate(PROMPTS):
        alone = sampler.sample([prompt], rng=0, return_state=True)
        for ours, theirs in zip(jax.tree.leaves(alone.state.cache), jax.tree.leaves(together.state.cache), strict=True):
            one, row = np.asarray(ours)[0], np.asarray(theirs)[index]
            if one.dtype == np.float32:
                assert one.any()
                found += int((one.view(np.uint32) != row.view(np.uint32)).sum())
        assert bool((alone.tokens[0] == together.tokens[index]).all()) or found
    return found


def test_the_bits_of_a_prompt_do_not_depend_on_the_others() -> None:
    sampler = make_sampler()
    assert differing(sampler) > 0, "plain JAX gives the same bits here: the test would prove nothing"
    with bijax.set_batch_invariant_mode():
        assert differing(sampler) == 0
