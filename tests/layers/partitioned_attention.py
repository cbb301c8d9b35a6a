"""Latent and linear attention on eight devices of a CPU, run as a program of its own, which `test_partition` starts."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, PartitionedLlama, partition
from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.latent import LatentConfig
from flax_layers.checkpoint.linear_attention import LinearAttentionConfig
from tests.layers.partitioned_experts import SHARED, mesh, trained
from tests.layers.partitioned_models import CONFIG, TOKENS

LATENT = LatentConfig(rank=16, nope_head_dim=4, rope_head_dim=8, value_head_dim=4, query_rank=12)
LINEAR = LinearAttentionConfig(num_key_heads=8, num_value_heads=16, key_dim=4, value_dim=4, layers=(True, False))
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"linear": LINEAR, "num_layers": 2, "qk_norm": True, "output_gate": True, "rotary_dim": 4},
    "latent": {"latent": LATENT},
}
"""A hybrid as Qwen3-Next is, and a model as DeepSeek-V3 is, with eight heads of each kind."""


def llama(kind: str, seed: int = 0, **changes: Any) -> Llama:
    return Llama(LlamaConfig(**{**CONFIG, **KINDS[kind], **changes}), rngs=nnx.Rngs(seed))


def plain_logits(cut: PartitionedLlama) -> jax.Array:
    plain = cut.with_ops(PLAIN)
    return jax.jit(plain.logits)(plain.params, TOKENS)


def gradients(kind: str, *counts: int, dtype: Any = jnp.float32, **changes: Any) -> None:
    """Loss, logits and gradients on one device and on others; plain JAX, whose logits depend on their number."""
    config = LlamaConfig(**{**CONFIG, **KINDS[kind], **changes})
    model = Llama(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    first = partition(model, mesh(1, 1))
    expected, plain = trained(first), plain_logits(first)
    if dtype == jnp.float32:
        np.testing.assert_allclose(jax.jit(model)(TOKENS), expected[1], rtol=1e-4, atol=1e-5)
    assert_bits_equal(jax.device_get(first.whole(first.params)), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for devices in counts:
        cut = partition(model, mesh(devices, 1))
        own = cut.params["blocks"][0]["attention"]
        for name in ("conv", "a_log") if kind == "linear" else ("key_up", "value_up"):
            assert own[name].addressable_shards[0].data.shape[0] * devices == own[name].shape[0]
        assert_bits_equal(trained(cut), expected)
        with pytest.raises(AssertionError):
            assert_bits_equal(plain_logits(cut), plain)


def chunks(kind: str, *counts: int) -> None:
    """A prompt in two parts against whole sequences; states are cut by heads, latents are on all devices."""
    model = llama(kind)
    first = partition(model, mesh(1, 1))
    expected = jax.jit(first.logits)(first.params, TOKENS)
    for devices in counts:
        cut = partition(model, mesh(devices, 1))
        extend, cache, found = jax.jit(cut.extend), cut.cache(batch=2, capacity=16), []
        for part in (TOKENS[:, :5], TOKENS[:, 5:]):
            logits, cache = extend(cut.params, part, cache)
            found.append(logits)
        assert_bits_equal(jnp.concatenate(found, axis=1), expected)
        if kind == "latent":
            assert cache.keys[0].sharding.is_fully_replicated
            continue
        [state] = cache.states
        assert state.rule.edge.sharding.is_fully_replicated
        for array, axis in ((state.rule.state, 1), (state.rule.inverse, 1), (state.rule.key, 1), (state.inputs, 2)):
            assert array.sharding.shard_shape(array.shape)[axis] * devices == array.shape[axis]


CHECKS: dict[str, Any] = {
    "chunks of linear attention": lambda: chunks("linear", 1, 8),
    "chunks of latent attention": lambda: chunks("latent", 1, 8),
    "gradients of linear attention": lambda: gradients("linear", 2, 8),
    "gradients of latent attention": lambda: gradients("latent", 2, 8),
    "linear attention with experts": lambda: gradients("linear", 4, experts=SHARED),
    "latent attention in bfloat16": lambda: gradients("latent", 4, dtype=jnp.bfloat16),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
