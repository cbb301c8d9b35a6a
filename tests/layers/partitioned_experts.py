"""Models with experts on eight devices of a CPU, run as a program of its own, which `test_partition` starts."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, PartitionedLlama, Routing, load_partitioned, partition
from flax_layers.checkpoint import LlamaConfig, load_checkpoint
from flax_layers.checkpoint.experts import ExpertsConfig
from tests.layers import checkpoint_files, deepseek_files, hybrid_files
from tests.layers.partitioned_models import CONFIG, TOKENS

SHARED = ExpertsConfig(intermediate_size=16, shared_size=16, shared_gate=True, routing=Routing(num_experts=8, topk=3))
"""Eight experts and a gated shared expert, as Qwen3-Next has."""


def mesh(tensor: int, expert: int) -> Mesh:
    devices = jax.devices()[: tensor * expert]
    return jax.make_mesh((expert, tensor), ("expert", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def llama(**changes: Any) -> Llama:
    return Llama(LlamaConfig(**{**CONFIG, "experts": SHARED, **changes}), rngs=nnx.Rngs(0))


def trained(cut: PartitionedLlama) -> Any:
    """Returns the loss, the logits and the gradients of all parameters as one device has them."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = cut.logits(params, TOKENS)
        rows = logits[:, :-1].reshape(-1, logits.shape[-1])
        return bijax.sum(bijax.softmax_cross_entropy(rows, TOKENS[:, 1:].reshape(-1)), axis=0), logits

    (total, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(cut.params)
    return total, logits, cut.whole(grads)


def gradients(*meshes: tuple[int, int]) -> None:
    """Experts over one axis or both; plain JAX, whose logits depend on the number of devices, on the same meshes."""
    model = llama()
    first = partition(model, mesh(1, 1))
    expected, plain = trained(first), first.with_ops(PLAIN)
    plain_logits = jax.jit(plain.logits)(plain.params, TOKENS)
    np.testing.assert_allclose(jax.jit(model)(TOKENS), expected[1], rtol=1e-4, atol=1e-5)
    for tensor, expert in meshes:
        cut = partition(model, mesh(tensor, expert))
        kernel = cut.params["blocks"][0]["mlp"]["gate_up"]
        assert kernel.sharding.spec == P(("expert", "model"), None, None)
        assert kernel.addressable_shards[0].data.shape[0] == 8 // (tensor * expert)
        assert_bits_equal(trained(cut), expected)
        plain = cut.with_ops(PLAIN)
        with pytest.raises(AssertionError):
            assert_bits_equal(jax.jit(plain.logits)(plain.params, TOKENS), plain_logits)


def loading() -> None:
    """Checkpoints with experts, latent, linear and gated attention are read into the shards of `partition`."""
    with tempfile.TemporaryDirectory() as made:
        folders = {
            "DeepSeek-V3": deepseek_files.write_model(Path(made) / "v3", deepseek_files.V3),
            "Qwen3-Next": checkpoint_files.write_folder(
                Path(made) / "next", hybrid_files.fields("qwen3_next"), hybrid_files.weights("qwen3_next")
            ),
        }
        for name, folder in folders.items():
            checkpoint = load_checkpoint(folder)
            model = Llama.from_checkpoint(checkpoint)
            expected = partition(model, mesh(2, 2), leaves=4)
            loaded = load_partitioned(checkpoint, mesh(2, 2), leaves=4)
            assert loaded.specs == expected.specs, name
            assert_bits_equal(jax.device_get(loaded.params), jax.device_get(expected.params))
            assert jax.tree.map(lambda x: x.sharding, loaded.params) == jax.tree.map(
                lambda x: x.sharding, expected.params
            )
            assert_bits_equal(
                jax.device_get(expected.whole(expected.params)), nnx.to_pure_dict(nnx.state(model, nnx.Param))
            )


def caches(kind: str) -> None:
    """A prompt in two parts and on one device, against whole sequences; latents and states are repeated."""
    with tempfile.TemporaryDirectory() as made:
        if kind == "latent":
            folder = deepseek_files.write_model(Path(made) / "m", deepseek_files.V3)
        else:
            fields, weights = hybrid_files.fields("qwen3_next"), hybrid_files.weights("qwen3_next")
            folder = checkpoint_files.write_folder(Path(made) / "m", fields, weights)
        model = Llama.from_checkpoint(load_checkpoint(folder))
    one = partition(model, mesh(1, 1), leaves=4)
    expected = jax.jit(one.logits)(one.params, TOKENS)
    cut = partition(model, mesh(2, 2), leaves=4)
    extend, cache, found = jax.jit(cut.extend), cut.cache(batch=2, capacity=16), []
    for part in (TOKENS[:, :5], TOKENS[:, 5:]):
        logits, cache = extend(cut.params, part, cache)
        found.append(logits)
    assert_bits_equal(jnp.concatenate(found, axis=1), expected)
    keys = cache.keys[0].sharding.shard_shape(cache.keys[0].shape)
    assert keys[2] == (1 if kind == "latent" else hybrid_files.KV_HEADS // 2)
    for state in cache.states:
        assert state.rule.state.sharding.shard_shape(state.rule.state.shape)[1] == hybrid_files.VALUE_HEADS // 2


CHECKS: dict[str, Any] = {
    "loading experts": loading,
    "gradients with experts": lambda: gradients((1, 8), (2, 2)),
    "gradients with experts on both axes": lambda: gradients((8, 1), (4, 2), (1, 2)),
    "latent attention": lambda: caches("latent"),
    "linear attention": lambda: caches("linear"),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
