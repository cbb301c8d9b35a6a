"""Running a Llama model block by block, for generation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layers import Embed, KVCache, LayerCache, Linear, RMSNorm, RotaryEmbedding
from .llama import Block, Llama, Rotary, project, start_tokens


class LayeredModel:
    """A model and a cache that it owns, run by three jitted functions: before, in and behind the blocks.

    All blocks share one compiled program, where XLA would compile each of them again in a program for the whole
    model; the cache is updated in place. The bits are those of the whole model in one program.

    Args:
        model: The model.
        cache: An empty cache. Its arrays are used up.
    """

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self._model = model
        # Flattening a module takes longer than a block of a small model, so it is done once.
        self._structure = jax.tree.structure(model.blocks[0])
        self._parameters = [tuple(jax.tree.leaves(block)) for block in model.blocks]
        self._stored = list(zip(cache.keys, cache.values, strict=True))
        self._page_table = cache.page_table
        self._capacity = cache.capacity

    def extend(self, tokens: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Appends tokens to the sequences; returns the residual stream (B, T, hidden_size) behind the last block.

        Args:
            tokens: (B, T) token ids, each sequence padded at its end.
            start: (B,) tokens that each sequence holds.
            lengths: (B,) new tokens of each sequence. There must be room for them; that is not checked here.
        """
        places = (jnp.asarray(start), jnp.asarray(lengths))
        x, rotary = _start(self._model.embed, self._model.rotary, jnp.asarray(tokens), *places, self._capacity)
        for layer, parameters in enumerate(self._parameters):
            x, *stored = _extend(
                self._structure, parameters, x, rotary, *self._stored[layer], self._page_table, *places
            )
            self._stored[layer] = tuple(stored)
        end: jax.Array = x
        return end

    def choose(self, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most probable token (B,) after each row of x (B, hidden_size), and its log-probability."""
        token, logprob = _choose(self._model.norm, self._model.projection, x)
        return np.asarray(token), np.asarray(logprob)


@functools.partial(jax.jit, static_argnames="capacity")
def _start(
    embed: Embed, rotary: RotaryEmbedding, tokens: jax.Array, start: jax.Array, lengths: jax.Array, capacity: int
) -> tuple[jax.Array, Rotary]:
    return start_tokens(embed, rotary, tokens, start=start, lengths=lengths, capacity=capacity)


@functools.partial(jax.jit, static_argnames="structure", donate_argnames=("keys", "values"))
def _extend(
    structure: Any,
    parameters: tuple[jax.Array, ...],
    x: jax.Array,
    rotary: Rotary,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    block: Block = jax.tree.unflatten(structure, parameters)
    x, cache = block.extend(x, rotary, LayerCache(keys, values, page_table), start=start, lengths=lengths)
    return x, cache.keys, cache.values


@jax.jit
def _choose(norm: RMSNorm, projection: Embed | Linear, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = project(norm, projection, x)
    token = jnp.argmax(logits, axis=-1)
    return token, jnp.take_along_axis(norm.ops.log_softmax(logits), token[:, None], axis=-1)[:, 0]
