"""The Llama model and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._signature import ConstructorSignature
from ..ops import INVARIANT, Ops
from .block import Block, Rotary, Stream, check_room, project, start_tokens
from .layers import DeltaNetSlots, DeltaNetState, Embed, GatedDeltaNet, KVCache, Linear, RMSNorm, RotaryEmbedding
from .layers._dtypes import check_float
from .llama_weights import load_weights

if TYPE_CHECKING:
    # Reading checkpoints needs packages that the model does not.
    from ..checkpoint import Checkpoint, LlamaConfig


class Llama(nnx.Module):
    """A Llama language model, or a relative, as the config says.

    The relatives are Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and 3, DeepSeek-V2 and V3, Kimi-K2, and two models in
    which most layers have linear attention and keep a state instead of keys and values: Qwen3-Next and the text model
    of Qwen3.5.

    Args:
        config: The model's numbers.
        dtype: Dtype of the computation. Logits are float32.
        param_dtype: Dtype of the parameters.
        remat: Whether the backward pass recomputes each block instead of saving its activations.
        ops: The operations to compute with: `INVARIANT`, or `PLAIN` for stock JAX. To switch an existing model, sharing
            its parameters: `nnx.with_attributes(model, ops=PLAIN)`.
        rngs: Keys; `rngs.params()` is drawn from.

    Raises:
        TypeError: If the operations are not `Ops`, or a dtype is not a floating one of 16 bits or more.

    Attributes:
        config: The model's numbers.
        embed: Embedding; the output projection too, if `config.tie_word_embeddings`.
        rotary: Rotary embedding.
        window_rotary: That of layers with a window, if `config.window_rope_theta` says that they have another.
        blocks: The blocks.
        norm: The last norm.
        lm_head: Output projection, or None.

    Guarantee: row-invariant with `INVARIANT`: the logits of a token depend on the tokens up to it in its own sequence,
    whatever the batch and the padding, and are the same from `__call__` (under `jax.grad` too) and from `extend`,
    however the sequence is cut into chunks, from a contiguous or a paged cache.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> model = Llama(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[1, 5, 9], [1, 7, 3]])
        >>> logits = model(tokens)
        >>> logits.shape
        (2, 3, 32)
        >>> last, cache = model.extend(tokens[:1], model.cache(batch=1, capacity=8))
        >>> bool((last[0] == logits[0]).all())
        True
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: bool = False,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        if not isinstance(ops, Ops):
            raise TypeError(f"Llama: ops must be flax_layers.INVARIANT or flax_layers.PLAIN, got {ops!r}.")
        check_float("Llama", "dtype", dtype)
        check_float("Llama", "param_dtype", param_dtype)
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ops": ops, "rngs": rngs}
        self.config = config
        self.dtype = dtype
        self.remat = remat
        self.embed = Embed(config.vocab_size, config.hidden_size, scale=config.embedding_scale, **common)
        self._set_rotary()
        self.blocks = nnx.List(Block(config, layer, **common) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, scale_offset=config.norm_offset, **common)
        self.lm_head = (
            nnx.data(None)
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size, config.vocab_size, use_bias=False, preferred_element_type=jnp.float32, **common
            )
        )

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: bool = False,
        ops: Ops = INVARIANT,
    ) -> Llama:
        """Returns the model of a checkpoint. The weights are read one after another.

        Args:
            checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
            dtype: Dtype of the computation.
            param_dtype: Dtype of the parameters.
            remat: As for the constructor.
            ops: The operations to compute with.
        """
        config = checkpoint.config
        model: Llama = nnx.eval_shape(
            lambda: cls(config, dtype=dtype, param_dtype=param_dtype, remat=remat, ops=ops, rngs=nnx.Rngs(0))
        )
        model._set_rotary()
        load_weights(model, checkpoint.weights)
        return model

    def _set_rotary(self) -> None:
        config, window_theta = self.config, self.config.window_rope_theta
        sizes = config.head_dim, config.max_position_embeddings
        scaling: dict[str, Any] = {}
        if config.rope_scaling is not None:
            scaling = {"divisors": config.rope_scaling.divisors, "magnitude": config.rope_scaling.magnitude}
        self.rotary = RotaryEmbedding(*sizes, theta=config.rope_theta, rotary_dim=config.rotary_dim, **scaling)
        self.window_rotary: Any = (
            nnx.data(None) if window_theta is None else RotaryEmbedding(*sizes, theta=window_theta)
        )

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]:
        """The rotary embeddings that layers have; `rotary_of` says which one has which."""
        return (self.rotary,) if self.window_rotary is None else (self.rotary, self.window_rotary)

    def rotary_of(self, layer: int) -> int:
        """Returns which of `rotaries` a layer has."""
        return int(self.window_rotary is not None and self.config.window(layer) is not None)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes whole sequences, as in training.

        Args:
            tokens: (B, T) integers. A sequence shorter than T is padded at its end with any token.

        Returns:
            (B, T, vocab_size) float32 logits.

        Raises:
            TypeError: If the tokens are not integers.
            ValueError: If their shape is wrong, T is more than `config.max_position_embeddings`, or a token is out of
                range; a token known only inside `jax.jit` gives nan instead.
        """
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Maps whole sequences to the residual stream (B, T, hidden_size) after the last block; see `__call__`."""
        batch, length = _batch_and_length(tokens)
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"Llama: sequences must have at most {self.config.max_position_embeddings} tokens"
                f" (max_position_embeddings), got tokens of shape {tokens.shape}."
            )
        x = self.embed(tokens)
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        angles = [rotary(positions) for rotary in self.rotaries]
        run: Callable[[Block, jax.Array, Rotary], jax.Array] = Block.__call__
        if self.remat:
            run = jax.checkpoint(run)
        for index, block in enumerate(self.blocks):
            x = run(block, x, angles[self.rotary_of(index)])
        return x

    def extend(
        self, tokens: jax.Array, cache: KVCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Appends tokens to the sequences in a cache: a prompt, a chunk of one, or one token each.

        Args:
            tokens: (B, T) integers, each sequence padded at its end with any token.
            cache: What the sequences hold so far; see `cache` and `paged_cache`.
            lengths: (B,) integers from 0 to T, new tokens of each sequence; T for all by default.

        Returns:
            (B, T, vocab_size) float32 logits, where the first lengths[b] of a sequence are valid, and the cache with
            the new tokens.

        Raises:
            TypeError: If the tokens or lengths are not integers.
            ValueError: If a shape does not fit, a length or a token is out of range, or the cache is full; where that
                is known only inside `jax.jit`, the logits of the tokens concerned and of those after them are nan.
        """
        batch, length = _batch_and_length(tokens)
        cache.check(batch, self.config, tokens)
        lengths = jnp.full(batch, length, jnp.int32) if lengths is None else jnp.asarray(lengths)
        check_room(cache.lengths, lengths, length, cache.capacity)
        lengths = lengths.astype(cache.lengths.dtype)
        x, angles = start_tokens(
            self.embed, self.rotaries, tokens, start=cache.lengths, lengths=lengths, capacity=cache.capacity
        )
        kept: list[Any] = []
        stream: Stream = (x, None)
        for index, (block, held) in enumerate(zip(self.blocks, cache.layers(self.config), strict=True)):
            angle = angles[self.rotary_of(index)]
            stream, new = block.extend(stream, angle, held, start=cache.lengths, lengths=lengths)
            kept.append(new)
        cache = replace(cache.with_layers(kept), lengths=cache.lengths + lengths)
        return project(self.norm, self.projection, stream, self.config.logits_soft_cap), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps the residual stream (..., hidden_size) after the last block to float32 logits (..., vocab_size)."""
        return project(self.norm, self.projection, (x, None), self.config.logits_soft_cap)

    @property
    def projection(self) -> Embed | Linear:
        """The output projection: `lm_head`, or the tied embedding."""
        return self.embed if self.lm_head is None else self.lm_head

    def cache(self, *, batch: int, capacity: int) -> KVCache:
        """Returns an empty contiguous cache.

        Args:
            batch: Number of sequences.
            capacity: Tokens that each can hold.

        Raises:
            ValueError: If a size is negative.
        """
        cache = KVCache.contiguous(batch=batch, capacity=capacity, **self.cache_sizes())
        return replace(cache, states=self.init_states(batch))

    def paged_cache(self, page_table: Any, *, num_pages: int, page_size: int) -> KVCache:
        """Returns an empty paged cache.

        Args:
            page_table: (B, pages per sequence) integers: the pages of each sequence, in the order of its tokens.
            num_pages: Pages of the cache.
            page_size: Tokens of a page.

        Raises:
            TypeError: If the page table does not hold integers.
            ValueError: If it has another rank or points outside the cache, or if a size is negative.
        """
        cache = KVCache.paged(page_table, num_pages=num_pages, page_size=page_size, **self.cache_sizes())
        return replace(cache, states=self.init_states(cache.batch))

    def init_states(self, batch: int) -> tuple[DeltaNetState, ...]:
        """Returns the states of sequences without tokens, for each layer with linear attention."""
        return tuple(layer.init_state(batch, self.dtype) for layer in self._linear_layers())

    def init_slots(self, number: int) -> tuple[DeltaNetSlots, ...]:
        """Returns slots for the states of running sequences, for each layer with linear attention."""
        return tuple(layer.init_slots(number, self.dtype) for layer in self._linear_layers())

    def _linear_layers(self) -> list[GatedDeltaNet]:
        return [block.attention for block in self.blocks if isinstance(block.attention, GatedDeltaNet)]

    def cache_sizes(self) -> dict[str, Any]:
        """Returns the arguments of `KVCache.paged` that the model fixes."""
        config = self.config
        linear = sum(config.is_linear(layer) for layer in range(config.num_layers))
        common = {"num_layers": config.num_layers - linear, "dtype": self.dtype}
        if config.latent is not None:
            return {**common, "num_kv_heads": 1, "head_dim": config.latent.width, "has_values": False}
        return {**common, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _batch_and_length(tokens: jax.Array) -> tuple[int, int]:
    if not hasattr(tokens, "ndim"):
        raise TypeError(f"Llama: tokens must be an array, got {type(tokens).__name__}; convert it with jnp.asarray.")
    if tokens.ndim != 2:
        raise ValueError(f"Llama: tokens must have the shape (batch, length), got {tokens.shape}.")
    batch, length = tokens.shape
    return batch, length
