"""A Llama of the layers that Flax NNX comes with, as a user would write it; no layer is one of this project."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_layers.checkpoint import LlamaConfig


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of (batch, tokens, heads, head_dim), halves as pairs."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)

        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.q_proj, self.o_proj = linear(config.hidden_size, width), linear(width, config.hidden_size)
        self.k_proj, self.v_proj = linear(config.hidden_size, kv_width), linear(config.hidden_size, kv_width)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.input_layernorm(x)
        q, k, v = (p(y).reshape(*y.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = jax.nn.dot_product_attention(rotate(q, self.theta), rotate(k, self.theta), v, is_causal=True)
        x = x + self.o_proj(y.reshape(*y.shape[:2], -1))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(nnx.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)

    def __call__(self, tokens: jax.Array, shift: jax.Array | None = None) -> jax.Array:
        """Logits of (batch, tokens); `shift` is added to the embedded tokens, for its gradient."""
        x = self.embed_tokens(tokens)
        x = x if shift is None else x + shift
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.attend(self.norm(x))


def load(config: LlamaConfig, weights: Mapping[str, np.ndarray]) -> Llama:
    """Returns a model with the weights of a checkpoint, under Hugging Face names."""
    model: Llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))

    def put(parameter: Any, name: str) -> None:
        value = weights[f"{name}.weight"]
        value = value.T if value.ndim == 2 and parameter is not model.embed_tokens.embedding else value
        assert parameter.shape == value.shape
        parameter.set_value(jnp.asarray(value))

    put(model.embed_tokens.embedding, "model.embed_tokens")
    put(model.norm.scale, "model.norm")
    for index, layer in enumerate(model.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            put(getattr(layer, name).scale, f"model.layers.{index}.{name}")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            put(getattr(layer, name).kernel, f"model.layers.{index}.self_attn.{name}")
        for name in ("gate_proj", "up_proj", "down_proj"):
            put(getattr(layer, name).kernel, f"model.layers.{index}.mlp.{name}")
    return model
