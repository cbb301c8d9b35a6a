"""Partitioned models on eight devices of a CPU, run as a program of its own, which `test_partition` starts."""

import sys
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
from flax_layers import INVARIANT, PLAIN, Llama, PartitionedLlama, load_partitioned, partition
from flax_layers.checkpoint import Checkpoint, LlamaConfig, LoRA, Weights
from flax_layers.checkpoint.weights import expected_shapes
from flax_layers.models.adapters import sort_tokens
from flax_layers.models.layers import Linear, RMSNorm
from flax_layers.models.parallel_adapters import adapter_specs, cut_adapters
from flax_layers.models.parallel_cut import Cut
from flax_layers.models.parallel_heads import ParallelHeadNorm
from flax_layers.models.parallel_layers import ColumnParallelLinear, RowParallelLinear
from tests.arrays import on_device

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
TOKENS = on_device(np.random.default_rng(0).integers(0, 64, (2, 9)))


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def trained(model: Llama, devices: int) -> Any:
    """Returns the loss, the logits and the gradients of all parameters as one device has them."""
    partitioned = partition(model, mesh(devices))

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = partitioned.logits(params, TOKENS)
        rows = logits[:, :-1].reshape(-1, logits.shape[-1])
        return bijax.sum(bijax.softmax_cross_entropy(rows, TOKENS[:, 1:].reshape(-1)), axis=0), logits

    (total, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(partitioned.params)
    return total, logits, partitioned.whole(grads)


def served(model: Llama, devices: int) -> Any:
    """Returns the logits of a prompt in two parts, and the keys."""
    partitioned = partition(model, mesh(devices))
    extend = jax.jit(partitioned.extend)
    first, cache = extend(partitioned.params, TOKENS[:, :5], partitioned.cache(batch=2, capacity=16))
    second, cache = extend(partitioned.params, TOKENS[:, 5:], cache)
    return jnp.concatenate([first, second], axis=1), cache.keys


def parameters() -> None:
    """The parameters are sharded as the specs say, and those of one device come back."""
    config = LlamaConfig(**{**CONFIG, "qk_norm": True, "qkv_bias": True, "tie_word_embeddings": False})
    model = Llama(config, rngs=nnx.Rngs(0))
    for devices in (1, 8):
        cut = partition(model, mesh(devices))
        assert_bits_equal(jax.device_get(cut.whole(cut.params)), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        jax.tree.map(lambda x, spec, cut=cut: x.sharding.spec == spec or pytest.fail(f"{spec}"), cut.params, cut.specs)
    kernel = cut.params["blocks"][0]["attention"]["qkv"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (32, 1, 24)
    # One group has a head of queries, of keys and of values.
    whole = model.blocks[0].attention.qkv.kernel[...]
    assert_bits_equal(kernel[:, 3], jnp.concatenate([whole[:, start + 24 : start + 32] for start in (0, 64, 128)], 1))


def loading() -> None:
    """A checkpoint is read into the shards of `partition`, and no device gets more than its part of a weight."""
    config = LlamaConfig(**{**CONFIG, "qk_norm": True, "qkv_bias": True, "tie_word_embeddings": False})
    rng, largest = np.random.default_rng(0), []
    shapes = dict(expected_shapes(config))
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def read(name: str) -> np.ndarray:
        found = [s.data.size for x in jax.live_arrays() if x not in before for s in x.addressable_shards if x.ndim > 1]
        largest.append(max(found, default=0))
        return values[name]

    for dtype in (jnp.float32, jnp.bfloat16):
        options = {"dtype": dtype, "param_dtype": dtype}
        checkpoint = Checkpoint(config, Weights(shapes, values.__getitem__), tokenizer=None)
        expected = partition(Llama.from_checkpoint(checkpoint, **options), mesh(8))
        before: Any = _Identities(jax.live_arrays())
        largest.clear()
        loaded = load_partitioned(Checkpoint(config, Weights(shapes, read), tokenizer=None), mesh(8), **options)
        assert max(largest) == 32 * 3 * 8  # the queries, keys and values of one head
        assert loaded.specs == expected.specs
        assert jax.tree.map(lambda x: x.sharding, loaded.params) == jax.tree.map(lambda x: x.sharding, expected.params)
        assert_bits_equal(jax.device_get(loaded.params), jax.device_get(expected.params))
        assert_bits_equal(jax.device_get(loaded.rest), jax.device_get(expected.rest))
    with pytest.raises(ValueError, match="must divide the key/value heads, got 8 devices and 2 heads"):
        load_partitioned(Checkpoint(LlamaConfig(**{**CONFIG, "num_kv_heads": 2}), {}, tokenizer=None), mesh(8))


class _Identities:
    """Arrays, which are found by identity, and kept so that no other one gets it."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = {id(array): array for array in arrays}

    def __contains__(self, array: Any) -> bool:
        return id(array) in self._arrays


def layers() -> None:
    """Projections side by side, a norm of heads and the product that follows, with the gradients of all weights."""
    heads, width, features = 8, 4, 16
    rngs = nnx.Rngs(0)
    qkv = Linear(features, 3 * heads * width, rngs=rngs)
    norm, out = RMSNorm(width, rngs=rngs), Linear(heads * width, features, rngs=rngs)
    x = on_device(np.random.default_rng(1).standard_normal((2, 5, features)), jnp.float32)

    def gradients(devices: int) -> Any:
        cut = Cut("model", devices, 8)
        columns, rows = ColumnParallelLinear(qkv, (heads * width,) * 3, cut), RowParallelLinear(out, cut)
        model = (columns, ParallelHeadNorm(norm, heads, cut), rows)
        graph, state = nnx.split(model)
        params = nnx.to_pure_dict(state)

        def forward(params: Any, x: jax.Array) -> jax.Array:
            part = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
            columns, norm, rows = nnx.merge(graph, part)
            query, key, value = jnp.split(columns(x), 3, axis=-1)
            normed = norm(query.reshape(2, 5, heads // devices, width)).reshape(query.shape)
            return rows(INVARIANT.swiglu(normed, key) + value)

        specs = jax.tree.map(lambda _: P(), params)
        for index, layer in ((0, columns), (2, rows)):
            specs[index].update({name: layer.specs()[name] for name in ("kernel", "bias")})
        run = jax.shard_map(forward, mesh=mesh(devices), in_specs=(specs, P()), out_specs=P())
        y, pull = jax.vjp(run, params, x)
        return y, *pull(y)

    assert_bits_equal(jax.jit(gradients, static_argnums=0)(8), jax.jit(gradients, static_argnums=0)(1))


def adapters() -> None:
    """Adapters of a layer whose columns are cut and of one whose rows are; plain JAX differs for the latter."""
    rng, tokens = np.random.default_rng(2), 5
    config = LlamaConfig(**{**CONFIG, "hidden_size": 64, "intermediate_size": 256})
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    shapes = {name: shape for name, shape in expected_shapes(config) if name.removesuffix(".weight") in names}

    def lora() -> LoRA:
        sides = [{n.removesuffix(".weight"): rng.standard_normal((3, s[1])) for n, s in shapes.items()},
                 {n.removesuffix(".weight"): rng.standard_normal((s[0], 3)) for n, s in shapes.items()}]  # fmt: skip
        return LoRA(3, 0.5, *({n: x.astype(np.float32) / 8 for n, x in side.items()} for side in sides))

    given, chosen = {"red": lora(), "blue": lora()}, jnp.asarray([2, 0, 1, 2, 1])
    x = rng.standard_normal((tokens, 64)).astype(np.float32)
    inner = rng.standard_normal((tokens, 256)).astype(np.float32)
    gate_up, down = (Linear(*sizes, use_bias=False, rngs=nnx.Rngs(0)) for sizes in ((64, 512), (256, 64)))

    def found(devices: int, ops: Any) -> Any:
        layers = (nnx.with_attributes(layer, ops=ops) for layer in (gate_up, down))
        cut = Cut("model", devices, 8)
        both = ColumnParallelLinear(next(layers), (256, 256), cut), RowParallelLinear(next(layers), cut)
        like = PartitionedLlama({}, {}, mesh(devices), "model", "expert", 8, config, jnp.float32, None, None, None)
        [stacks] = cut_adapters(like, given).blocks
        graph, state = nnx.split(both)
        specs = jax.tree.unflatten(jax.tree.structure(state), [both[0].specs()["kernel"], both[1].specs()["kernel"]])

        def run(state: Any, stacks: Any, x: Any, inner: Any, chosen: Any) -> Any:
            groups = sort_tokens(((0, 1),), chosen, 1)
            columns, rows = (
                stacks[name][0].adapt(layer, stacks[name], groups)
                for name, layer in zip(("mlp.gate_up", "mlp.down"), nnx.merge(graph, state), strict=True)
            )
            gate, up = jnp.split(columns(x), 2, axis=-1)
            return gate, up, rows(inner)

        in_specs = (specs, adapter_specs("model", stacks), P(), P(None, "model"), P())
        out_specs = (P(None, "model"), P(None, "model"), P())
        mapped = jax.jit(jax.shard_map(run, mesh=mesh(devices), in_specs=in_specs, out_specs=out_specs))
        return [np.asarray(y) for y in mapped(state, stacks, x, inner, chosen)]

    one, eight = found(1, INVARIANT), found(8, INVARIANT)
    assert_bits_equal(eight, one)
    weight = jnp.asarray(down.kernel[...], float)
    for row, adapter in ((0, "blue"), (2, "red")):
        change = given[adapter].change(names[2]).T
        np.testing.assert_allclose(one[2][row], inner[row] @ (np.asarray(weight) + change), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(one[2][1], inner[1] @ np.asarray(weight), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        assert_bits_equal(found(8, PLAIN)[2], found(1, PLAIN)[2])


def small() -> None:
    """Logits of a model with tied embeddings."""
    model = Llama(LlamaConfig(**CONFIG), rngs=nnx.Rngs(0))
    one = partition(model, mesh(1))
    expected = jax.jit(one.logits)(one.params, TOKENS)
    many = partition(model, mesh(8))
    assert_bits_equal(jax.jit(many.logits)(many.params, TOKENS), expected)
    np.testing.assert_allclose(jax.jit(model)(TOKENS), expected, rtol=1e-4, atol=1e-5)


def chunks() -> None:
    model = Llama(LlamaConfig(**CONFIG), rngs=nnx.Rngs(0))
    one = partition(model, mesh(1))
    expected = served(model, 1)
    assert_bits_equal(expected[0], jax.jit(one.logits)(one.params, TOKENS))
    for devices in (2, 8):
        assert_bits_equal(served(model, devices), expected)


def gradients(dtype: Any, counts: tuple[int, ...], **changes: Any) -> None:
    model = Llama(LlamaConfig(**{**CONFIG, **changes}), dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    expected = trained(model, 1)
    for devices in counts:
        assert_bits_equal(trained(model, devices), expected)


CHECKS: dict[str, Any] = {
    "parameters": parameters,
    "loading": loading,
    "layers": layers,
    "adapters": adapters,
    "small": small,
    "chunks": chunks,
    "gradients of Qwen3": lambda: gradients(jnp.float32, (2, 4, 8), qk_norm=True, num_layers=2),
    "gradients in bfloat16": lambda: gradients(jnp.bfloat16, (4, 8), tie_word_embeddings=False, qkv_bias=True),
    "gradients with shared heads": lambda: gradients(
        jnp.float32, (2,), num_kv_heads=2, qk_norm=True, output_norms=True, output_bias=True, mlp_bias=True
    ),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
