"""Whole mixture-of-experts layers as programs to time: ours, and the forms that one writes in plain JAX."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from flax_layers import INVARIANT, PLAIN
from flax_layers.ops import Ops
from flax_layers.routing import Routing

TOKENS: Final = (8, 64, 1, 8192)
_MOST_GATHERED: Final = 64  # weights of so many experts are copied for the tokens
_MOST_BYTES: Final = 9_000_000_000  # of the rows that `ragged_dot` repeats for every expert, and of a dense layer's

Arrays = dict[str, jax.Array]
Layer = Callable[[jax.Array, Arrays], jax.Array]


@dataclass(frozen=True)
class MoELayer:
    """A layer's sizes.

    Attributes:
        name: Model.
        features: Columns of a token.
        hidden: Width inside an expert.
        routing: How experts are selected.
    """

    name: str
    features: int
    hidden: int
    routing: Routing

    def make(self, key: jax.Array, quantized: bool) -> Arrays:
        """Returns random weights."""
        experts, c, f = self.routing.num_experts, self.features, self.hidden
        keys = jax.random.split(key, 4)
        weights: Arrays = {"router": _normal(keys[0], c, experts)}
        if self.routing.use_bias:
            weights["bias"] = jax.random.normal(keys[1], (experts,)) * 0.01
        for name, k, shape in (("gate_up", keys[2], (experts, c, 2 * f)), ("down", keys[3], (experts, f, c))):
            if quantized:
                weights[name] = jax.random.randint(k, shape, -127, 128, jnp.int8)
                weights[f"{name}_scale"] = jnp.full((experts, shape[2]), shape[1] ** -0.5 / 70, jnp.float32)
            else:
                weights[name] = _normal(k, *shape)
        return weights

    def tokens(self, number: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of a number of tokens."""
        return jax.ShapeDtypeStruct((number, self.features), jnp.bfloat16)

    def bytes_of_weights(self, quantized: bool) -> int:
        """Returns the bytes of all experts."""
        return self.routing.num_experts * self.features * self.hidden * (3 if quantized else 6)

    def ours(self, x: jax.Array, weights: Arrays) -> jax.Array:
        """The layer as `flax_layers` computes it."""
        return self._routed(INVARIANT, _experts_of(INVARIANT), x, weights)

    def plain(self, tokens: int, quantized: bool) -> dict[str, Layer]:
        """Returns the forms in plain JAX, by name, that fit in memory."""
        places, routing, itemsize = tokens * self.routing.topk, self.routing, 1 if quantized else 2
        forms: dict[str, Any] = {}
        if places * self.features * routing.num_experts * itemsize <= _MOST_BYTES:
            forms["ragged_dot"] = _experts_of(PLAIN)
        if tokens * routing.num_experts * (2 * self.hidden * 4 + self.features * 4) <= 4 * _MOST_BYTES:
            forms["dense"] = _dense
        if places <= _MOST_GATHERED and not quantized:
            forms["gathered weights"] = _gathered
        return {name: functools.partial(self._routed, PLAIN, form) for name, form in forms.items()}

    def _routed(self, ops: Ops, experts: Any, x: jax.Array, weights: Arrays) -> jax.Array:
        logits = ops.matmul(x, weights["router"], preferred_element_type=jnp.float32)
        selected, factors = ops.route(logits, weights.get("bias"), self.routing)
        y: jax.Array = experts(x, selected, factors, weights)
        return y


LAYERS: Final = (
    MoELayer("Qwen3-MoE", 2048, 768, Routing(num_experts=128, topk=8)),
    MoELayer(
        "DeepSeek-V3, 64 experts",
        7168,
        2048,
        Routing(
            num_experts=64,
            topk=8,
            scoring="sigmoid",
            num_groups=8,
            topk_groups=4,
            group_score="two largest",
            use_bias=True,
            scale=2.5,
        ),
    ),
)


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5).astype(jnp.bfloat16)


def _experts_of(ops: Ops) -> Any:
    def experts(x: jax.Array, selected: jax.Array, factors: jax.Array, weights: Arrays) -> jax.Array:
        names = "gate_up", "down"
        y: jax.Array
        if "down_scale" in weights:
            y = ops.quantized_experts(x, selected, factors, *((weights[n], weights[f"{n}_scale"]) for n in names))
        else:
            y = ops.experts(x, selected, factors, *(weights[n] for n in names))
        return y

    return experts


def _dense(x: jax.Array, selected: jax.Array, factors: jax.Array, weights: Arrays) -> jax.Array:
    """All tokens by all experts, most of them times zero."""
    experts = weights["down"].shape[0]
    share = jnp.zeros((x.shape[0], experts), jnp.float32)
    share = share.at[jnp.arange(x.shape[0])[:, None], selected].set(factors)
    inner = _activation(_multiply("tc,ecf->etf", x, weights, "gate_up"))
    y = _multiply("etf,efc->etc", inner, weights, "down")
    return jnp.einsum("etc,te->tc", y, share.astype(y.dtype), preferred_element_type=jnp.float32).astype(x.dtype)


def _gathered(x: jax.Array, selected: jax.Array, factors: jax.Array, weights: Arrays) -> jax.Array:
    """Each token by copies of the weights of its experts."""
    inner = _activation(jnp.einsum("tc,tkcf->tkf", x, weights["gate_up"][selected]))
    y = jnp.einsum("tkf,tkfc->tkc", inner, weights["down"][selected]).astype(jnp.float32)
    return (y * factors[..., None]).sum(1).astype(x.dtype)


def _activation(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _multiply(spec: str, x: jax.Array, weights: Arrays, name: str) -> jax.Array:
    if f"{name}_scale" not in weights:
        return jnp.einsum(spec, x, weights[name])
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-30) / 127
    total = jnp.einsum(spec, jnp.round(wide / scale).astype(jnp.int8), weights[name], preferred_element_type=jnp.int32)
    return (total.astype(jnp.float32) * scale * weights[f"{name}_scale"][:, None]).astype(jnp.bfloat16)
