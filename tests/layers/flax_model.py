"""A language model of Flax's own layers, as its users write one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers.checkpoint import LlamaConfig


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: str | None,
    is_causal: bool,
    mask: jax.Array | None = None,
    **_: Any,
) -> jax.Array:
    mask = None if mask is None else mask.astype(bool)  # Flax combines masks as numbers
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, implementation=implementation
    )


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, implementation: str | None, **options: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.norms = nnx.List([nnx.RMSNorm(width, **options), nnx.LayerNorm(width, **options)])
        self.attention = nnx.MultiHeadAttention(
            config.num_heads,
            width,
            config.num_heads * config.head_dim,
            num_kv_heads=config.num_kv_heads,
            decode=False,
            attention_fn=functools.partial(_attention, implementation=implementation),
            **options,
        )
        self.up, self.down = nnx.Linear(width, inner, **options), nnx.Linear(inner, width, **options)

    def __call__(self, x: jax.Array, *, decode: bool = False) -> jax.Array:
        x = x + self.attention(self.norms[0](x), is_causal=not decode, decode=decode)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class FlaxModel(nnx.Module):
    """Tokens (B, T) to float32 logits; `from_rows` starts after the embedding.

    With `decode` each call takes the next token (B, 1) of sequences in the cache that `init_cache` has made.
    """

    def __init__(self, config: LlamaConfig, implementation: str | None = None, **options: Any) -> None:
        options["rngs"] = nnx.Rngs(0)
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **options)
        self.blocks = nnx.List(Block(config, implementation, **options) for _ in range(config.num_layers))
        self.norm = nnx.RMSNorm(config.hidden_size, **options)

    def init_cache(self, batch: int, capacity: int) -> None:
        for block in self.blocks:
            attention = block.attention
            attention.init_cache((batch, capacity, attention.in_features), attention.dtype)

    def __call__(self, tokens: jax.Array, *, decode: bool = False) -> jax.Array:
        return self.from_rows(self.embed(tokens), decode=decode)

    def from_rows(self, x: jax.Array, *, decode: bool = False) -> jax.Array:
        for block in self.blocks:
            x = block(x, decode=decode)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)
