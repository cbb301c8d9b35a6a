"""Models of int8 on eight devices of a CPU, run as a program of its own, which `test_partition` starts."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, convert, load_partitioned, partition
from flax_layers.checkpoint import load_checkpoint
from flax_layers.models.layers import QuantizedWeight, QuantLinear
from flax_layers.models.parallel_cut import Cut
from flax_layers.models.parallel_quant import ColumnParallelQuantLinear, GatheredQuantLinear
from tests.arrays import on_device
from tests.layers import deepseek_files, partitioned_attention, partitioned_experts
from tests.layers.partitioned_experts import mesh
from tests.layers.partitioned_models import TOKENS

WEIGHTS = (nnx.Param, QuantizedWeight)


def logits(cut: Any) -> jax.Array:
    return jax.jit(cut.logits)(cut.params, TOKENS)


def layers() -> None:
    """Projections side by side and the product that follows: bits of one device's layers.

    The control quantises each device's part of a row by itself and adds over the devices.
    """
    rng = np.random.default_rng(0)
    up, down = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((16, 96), (32, 16)))
    bias, smooth = on_device(rng.standard_normal(96), jnp.float32), on_device(rng.random(16) + 0.5, jnp.float32)
    first, second = QuantLinear.from_kernel(up, bias, smooth_scale=smooth), QuantLinear.from_kernel(down, jnp.ones(16))
    x = on_device(rng.standard_normal((3, 16)), jnp.float32)

    def own(layer: Any) -> jax.Array:
        gate, middle, last = jnp.split(layer(x), 3, axis=-1)
        return INVARIANT.swiglu(gate, middle) + last

    def run(devices: int, make: Any) -> jax.Array:
        cut = Cut("model", devices, 8)
        columns = ColumnParallelQuantLinear(first, (32, 32, 32), cut)
        graph, state = nnx.split((columns, make(second, cut)))
        specs = jax.tree.map(lambda _: P(), nnx.to_pure_dict(state))
        for index, layer in enumerate(nnx.merge(graph, state)):
            specs[index].update({n: s for n, s in layer.specs().items() if n in specs[index]})
        given = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(specs))

        def forward(state: Any) -> jax.Array:
            columns, rows = nnx.merge(graph, state)
            return rows(own(columns))

        return jax.jit(jax.shard_map(forward, mesh=mesh(devices, 1), in_specs=(given,), out_specs=P()))(state)

    expected = second(own(first))
    for devices in (1, 2, 8):
        assert_bits_equal(run(devices, GatheredQuantLinear), expected)
    assert_bits_equal(run(1, _Naive), expected)
    with pytest.raises(AssertionError):
        assert_bits_equal(run(8, _Naive), expected)
    with pytest.raises(ValueError, match="must divide the columns of a layer of int8, got 8 devices and 6 columns"):
        GatheredQuantLinear(QuantLinear(32, 6), Cut("model", 8, 8))


class _Naive(GatheredQuantLinear):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = PLAIN.quantized_matmul(x, self.weight[...], self.weight_scale[...])
        total = jax.lax.psum(y, "model")
        return total if self.bias is None else total + self.bias[...]

    def specs(self) -> dict[str, P]:
        return {"weight": P("model", None)}


def models(kind: str, *meshes: tuple[int, int], **changes: Any) -> None:
    """Logits have the bits of the model that is not cut; with plain JAX they depend on where experts are."""
    make = partitioned_experts.llama if kind == "experts" else lambda **k: partitioned_attention.llama(kind, **k)
    model = make(**changes)
    if kind == "experts":  # large kernels, so that their sums are not small against the residual stream
        model = jax.tree.map(lambda x: x * 8 if x.ndim == 3 else x, model)
    model = convert(model, quantize="int8")
    expected = jax.jit(lambda model: model(TOKENS))(model)
    plain = []
    for tensor, expert in meshes:
        cut = partition(model, mesh(tensor, expert))
        assert_bits_equal(logits(cut), expected)
        held = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, WEIGHTS)))
        assert_bits_equal(jax.device_get(jax.tree.leaves(cut.whole(cut.params))), jax.device_get(held))
        if kind == "experts":
            weight = cut.params["blocks"][0]["mlp"]["gate_up"]
            assert weight.dtype == jnp.int8
            assert weight.addressable_shards[0].data.shape[0] == 8 // (tensor * expert)
            plain.append(np.asarray(logits(cut.with_ops(PLAIN))))
    assert kind != "experts" or any((found != plain[0]).any() for found in plain)


def loading() -> None:
    """A checkpoint is read into shards of int8, as a model that is converted and then cut."""
    with tempfile.TemporaryDirectory() as made:
        checkpoint = load_checkpoint(deepseek_files.write_model(Path(made) / "m", deepseek_files.V3))
        rules: Any = {"lm_head": False}
        model = convert(Llama.from_checkpoint(checkpoint), rules, quantize="int8")
        expected = partition(model, mesh(2, 2), leaves=4)
        loaded = load_partitioned(
            checkpoint, mesh(2, 2), leaves=4, prepare=lambda model: convert(model, rules, quantize="int8")
        )
    assert loaded.specs == expected.specs
    assert jax.tree.map(lambda x: x.sharding, loaded.params) == jax.tree.map(lambda x: x.sharding, expected.params)
    assert_bits_equal(jax.device_get(loaded.params), jax.device_get(expected.params))


CHECKS: dict[str, Any] = {
    "layers of int8": layers,
    "loading int8": loading,
    "experts of int8": lambda: models("experts", (1, 1), (8, 1), (1, 8), (2, 2), qk_norm=True, qkv_bias=True),
    "linear attention in int8": lambda: models("linear", (1, 1), (8, 1)),
    "latent attention in int8": lambda: models("latent", (1, 1), (8, 1)),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
