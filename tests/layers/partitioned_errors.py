"""Models that devices cannot share are refused, run as a program of its own, which `test_partition` starts."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_layers import PLAIN, Llama, Routing, partition
from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.experts import ExpertsConfig
from flax_layers.checkpoint.linear_attention import LinearAttentionConfig
from tests.layers.parameters import filled
from tests.layers.partitioned_attention import KINDS
from tests.layers.partitioned_experts import mesh
from tests.layers.partitioned_models import CONFIG
from tests.layers.partitioned_models import mesh as line


def model_of(**changes: Any) -> Llama:
    return Llama(LlamaConfig(**{**CONFIG, **changes}), rngs=nnx.Rngs(0))


def llama(**changes: Any) -> Llama:
    model: Llama = filled(lambda: model_of(**changes))
    return model


def without_arrays(**changes: Any) -> Llama:
    model: Llama = nnx.eval_shape(lambda: model_of(**changes))
    return model


def bad_models() -> None:
    model = llama()

    def message(devices: int, axis: str = "model", leaves: int = 8, model: Any = model) -> str:
        with pytest.raises((TypeError, ValueError), match="partition") as error:
            partition(model, line(devices), axis=axis, leaves=leaves)
        return str(error.value)

    assert "axis must be one of the mesh's axes ('model',), got 'tensor'" in message(2, "tensor")
    assert "the number of devices of axis 'model' must be a power of two, got 3" in message(3)
    assert "got 4 leaves for the 8 devices" in message(8, leaves=4)
    few = llama(num_kv_heads=2)
    assert "must divide the key/value heads, got 4 devices and 2 heads" in message(4, model=few)
    odd = llama(vocab_size=60)
    assert "must divide the vocabulary, got 60" in message(1, model=odd)
    assert "INVARIANT" in message(1, model=nnx.with_attributes(model, ops=PLAIN))
    bad_experts()
    assert "must be a flax_layers.Llama, got Linear" in message(1, model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    part = partition(model, line(2))
    for tokens, wanted in (
        (jnp.full((1, 2), 64), "token ids must be from 0 to 63"),
        (jnp.ones((1, 65), int), "at most 64"),
    ):
        with pytest.raises(ValueError, match=wanted):
            part.logits(part.params, tokens)


def bad_experts() -> None:
    """Axes that do not fit the experts are refused; models without arrays will do for that."""

    def message(tensor: int, expert: int, **changes: Any) -> str:
        model = without_arrays(**changes)
        shape, devices = (expert, tensor), jax.devices()[: tensor * expert]
        over = jax.make_mesh(shape, ("expert", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)
        with pytest.raises(ValueError, match="partition") as error:
            partition(model, over)
        return str(error.value)

    experts = {"experts": ExpertsConfig(intermediate_size=16, routing=Routing(num_experts=6, topk=2))}
    assert "axis 'expert' must be a power of two, got 3; use 2 devices" in message(1, 3, **experts)
    assert "axes 'expert' and 'model' must divide the experts, got 4 devices and 6 experts" in message(2, 2, **experts)
    assert "axis 'expert' must have one device with a model without experts, got 2" in message(1, 2)
    shared = ExpertsConfig(intermediate_size=16, shared_size=12, routing=Routing(num_experts=8, topk=2))
    assert "must divide the width of the shared experts, got 12" in message(1, 2, experts=shared)
    with pytest.raises(ValueError, match="axis and expert_axis must be two axes, got 'model' for both"):
        partition(llama(), line(2), expert_axis="model")


def bad_heads() -> None:
    """Heads that the devices do not divide; models without arrays will do for that."""

    def message(kind: str, devices: int, **changes: Any) -> str:
        model = without_arrays(**{**KINDS[kind], **changes})
        with pytest.raises(ValueError, match="partition") as error:
            partition(model, mesh(devices, 1))
        return str(error.value)

    few = LinearAttentionConfig(num_key_heads=2, num_value_heads=8, key_dim=4, value_dim=4, layers=(True, False))
    assert "must divide the key heads of linear attention, got 4 devices and 2 heads" in message(
        "linear", 4, linear=few
    )
    narrow = LinearAttentionConfig(num_key_heads=2, num_value_heads=2, key_dim=2, value_dim=4, layers=(True, False))
    assert "columns of the key heads of linear attention, got 4" in message("linear", 2, linear=narrow)
    assert "must divide the query heads, got 4 devices and 6 heads" in message("latent", 4, num_heads=6, num_kv_heads=6)
    blocks = partition(llama(**KINDS["latent"]), mesh(8, 1)).params["blocks"]
    assert blocks[0]["attention"]["key_up"].sharding.spec == P("model", None, None)


CHECKS: dict[str, Any] = {"bad models": bad_models, "bad heads": bad_heads}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
