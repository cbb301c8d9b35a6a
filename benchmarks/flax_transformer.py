"""A transformer of Flax's own layers, of the shape of a Llama, for measuring what becomes of it under bijax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers.checkpoint import LlamaConfig


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: str,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """What `flax.nnx.dot_product_attention` calls when nothing is dropped, with a named implementation."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, implementation=implementation
    )


class FlaxBlock(nnx.Module):
    """Attention and a gated MLP, each preceded by a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, implementation: str, dtype: Any, param_dtype: Any) -> None:
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **common)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads,
            width,
            num_kv_heads=config.num_kv_heads,
            use_bias=False,
            decode=False,
            attention_fn=functools.partial(attention, implementation=implementation),
            **common,
        )
        self.mlp_norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **common)
        self.gate = nnx.Linear(width, inner, use_bias=False, **common)
        self.up = nnx.Linear(width, inner, use_bias=False, **common)
        self.down = nnx.Linear(inner, width, use_bias=False, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class FlaxTransformer(nnx.Module):
    """A language model without positions: tokens (B, T) to float32 logits (B, T, vocab_size).

    Args:
        config: Its numbers.
        implementation: Of `jax.nn.dot_product_attention`.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.
        remat: Whether the backward pass computes each block again.
    """

    def __init__(
        self, config: LlamaConfig, *, implementation: str, dtype: Any, param_dtype: Any, remat: bool = False
    ) -> None:
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.config = config
        self.remat = remat
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=nnx.Rngs(0), **common)
        self.blocks = nnx.List(
            FlaxBlock(config, implementation=implementation, **common) for _ in range(config.num_layers)
        )
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=nnx.Rngs(0), **common)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run: Any = nnx.remat(FlaxBlock.__call__) if self.remat else FlaxBlock.__call__
        x = self.embed(tokens)
        for block in self.blocks:
            x = run(block, x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)
