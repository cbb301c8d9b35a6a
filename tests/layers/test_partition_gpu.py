"""Latent and linear attention on two GPUs of one process: the bits of one."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bijax
from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, PartitionedLlama, Routing, ServedLlama, convert, partition
from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.experts import ExpertsConfig
from flax_layers.checkpoint.latent import LatentConfig
from flax_layers.checkpoint.linear_attention import LinearAttentionConfig
from tests.parallel.on_devices import AXIS, mesh

DEVICES: Final = len(jax.devices())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two GPUs of one process, got {DEVICES} device"),
]

CONFIG: Final = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_ids=(2,),
)
LINEAR: Final = LinearAttentionConfig(
    num_key_heads=8, num_value_heads=16, key_dim=64, value_dim=64, layers=(True, False)
)
LATENT: Final = LatentConfig(rank=128, nope_head_dim=64, rope_head_dim=64, value_head_dim=64, query_rank=128)
KINDS: Final[dict[str, dict[str, Any]]] = {
    "linear": {"linear": LINEAR, "num_layers": 2, "qk_norm": True, "output_gate": True},
    "latent": {"latent": LATENT},
}
TOKENS: Final = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 70))
PROMPTS: Final = [[1, 5, 9, 7], [int(t) for t in TOKENS[0, :10]]]
PARAMS: Final = SamplingParams(max_new_tokens=4, seed=3, logprobs=True, top_logprobs=2)
OPTIONS: Final = EngineOptions(page_size=16, num_pages=24, max_running=1, max_prefill_tokens=16, max_length=64)


def llama(kind: str) -> Llama:
    config = dataclasses.replace(CONFIG, **KINDS[kind])
    return Llama(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def trained(cut: PartitionedLlama) -> Any:
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = cut.logits(params, TOKENS)
        rows = logits[:, :-1].reshape(-1, logits.shape[-1])
        return bijax.sum(bijax.softmax_cross_entropy(rows, TOKENS[:, 1:].reshape(-1)), axis=0), logits

    (total, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(cut.params)
    return jax.device_get((total, logits, cut.whole(grads)))


def plain_logits(cut: PartitionedLlama) -> Any:
    plain = cut.with_ops(PLAIN)
    return jax.device_get(jax.jit(plain.logits)(plain.params, TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_logits_and_gradients(kind: str) -> None:
    model = llama(kind)
    one, two = (partition(model, mesh(devices), axis=AXIS) for devices in (1, 2))
    assert_bits_equal(trained(two), trained(one))
    with pytest.raises(AssertionError):
        assert_bits_equal(plain_logits(two), plain_logits(one))


def test_experts_and_layers_of_int8() -> None:
    """The bits of the model that is not cut."""
    experts = ExpertsConfig(intermediate_size=128, shared_size=128, routing=Routing(num_experts=8, topk=3))
    config = dataclasses.replace(CONFIG, experts=experts)
    model = convert(Llama(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), quantize="int8")
    expected = jax.device_get(jax.jit(lambda model: model(TOKENS))(model))
    for devices in (1, 2):
        cut = partition(model, mesh(devices), axis=AXIS)
        assert_bits_equal(jax.device_get(jax.jit(cut.logits)(cut.params, TOKENS)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine(kind: str) -> None:
    """Requests with a cold cache and a warm one, on one GPU and on two."""
    served, results = ServedLlama(llama(kind)), []
    for devices in (1, 2):
        engine = Engine(served.partitioned(mesh(devices), axis=AXIS), options=OPTIONS)
        for _ in range(2):
            outputs = engine.generate(PROMPTS, PARAMS)
            results.append([[(e.token, e.logprob, e.top) for e in o.completions[0].logprobs] for o in outputs])
    assert results[1:] == results[:1] * 3
