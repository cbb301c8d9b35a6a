"""The smallest model that the engine serves: one block of attention, in plain JAX, for tests and as an example."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bijax


class Weights(NamedTuple):
    """Weights of a `ToyModel`."""

    embed: jax.Array
    positions: jax.Array
    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights"],
    meta_fields=["heads", "invariant", "one_program", "least_common_prefix"],
)
@dataclass(frozen=True)
class ToyModel:
    """A language model with random weights. It follows `bijax.serving.Model`.

    Attributes:
        weights: The weights.
        heads: Heads of attention.
        invariant: Whether it computes with the operations of bijax, or with those of JAX.
        one_program: See `bijax.serving.Model`.
        least_common_prefix: The same.

    Guarantee: row-invariant, if `invariant`.
    """

    weights: Weights
    heads: int = 2
    invariant: bool = True
    one_program: bool = False
    least_common_prefix: int | None = None

    @classmethod
    def random(
        cls, *, seed: int, vocab_size: int = 160, width: int = 64, max_length: int = 256, heads: int = 2
    ) -> "ToyModel":
        """Returns a model with weights drawn from a seed."""
        rng = np.random.default_rng(seed)

        def draw(*shape: int, scale: float) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)

        narrow = width**-0.5
        return cls(
            Weights(
                draw(vocab_size, width, scale=1),
                draw(max_length, width, scale=1),
                draw(width, 3 * width, scale=2 * narrow),
                draw(width, width, scale=narrow),
                draw(width, 4 * width, scale=narrow),
                draw(4 * width, width, scale=narrow),
            ),
            heads,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.weights.embed.shape[0]

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.weights.positions.shape[0]

    def init_pages(self, num_pages: int, page_size: int) -> Any:
        """Returns keys and values, (pages, page_size, heads, width / heads) each."""
        shape = (num_pages, page_size, self.heads, self.weights.out.shape[0] // self.heads)
        return jnp.zeros(shape), jnp.zeros(shape)

    def extend(
        self,
        pages: Any,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Appends tokens to sequences; see `Model.extend`."""
        numbers = (page_table, start, lengths, common_prefix)
        hidden: jax.Array
        hidden, pages = _extend(self.weights, pages, tokens, *numbers, heads=self.heads, invariant=self.invariant)
        return hidden, pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden (R, width) to logits (R, vocab_size)."""
        return _logits(self.weights, hidden, invariant=self.invariant)

    def embed(self, hidden: jax.Array) -> jax.Array:
        """Returns hidden (R, width) as embeddings."""
        return hidden

    def plain(self) -> "ToyModel":
        """Returns the model with JAX's own operations."""
        return replace(self, invariant=False)

    def with_weights(self, weights: Any) -> "ToyModel":
        """Returns the model with the weights of another `ToyModel`, or with `Weights`."""
        found = weights.weights if isinstance(weights, ToyModel) else weights
        if not isinstance(found, Weights):
            raise TypeError(f"ToyModel: weights must be a ToyModel or Weights, got {type(weights).__name__}.")
        shapes = [(a.shape, b.shape) for a, b in zip(found, self.weights, strict=True) if a.shape != b.shape]
        if shapes:
            raise ValueError(f"ToyModel: the new weights must have the shape {shapes[0][1]}, got {shapes[0][0]}.")
        return replace(self, weights=found)


@functools.partial(jax.jit, static_argnames=("heads", "invariant"), donate_argnames="pages")
def _extend(
    weights: Weights,
    pages: tuple[jax.Array, jax.Array],
    tokens: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    *,
    heads: int,
    invariant: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rows, width = tokens.shape
    matmul = bijax.matmul if invariant else jnp.matmul
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = jnp.minimum(start[:, None] + offsets, weights.positions.shape[0] - 1)
    x = weights.embed[tokens] + weights.positions[positions]
    qkv = matmul(x, weights.qkv).reshape(rows, width, 3, heads, -1)
    places = _places(pages[0], page_table, positions, offsets < lengths[:, None])
    keys, values = (_write(cache, qkv[:, :, i + 1], places) for i, cache in enumerate(pages))
    attention = _plain_attention
    if invariant:
        attention = functools.partial(bijax.paged_attention, common_prefix_length=common_prefix)
    mixed = attention(qkv[:, :, 0], keys, values, page_table, start + lengths, query_seq_lengths=lengths)
    x = x + matmul(mixed.reshape(x.shape), weights.out)
    x = x + matmul(jax.nn.relu(matmul(x, weights.up)), weights.down)
    return x, (keys, values)


@functools.partial(jax.jit, static_argnames="invariant")
def _logits(weights: Weights, hidden: jax.Array, *, invariant: bool) -> jax.Array:
    return (bijax.matmul if invariant else jnp.matmul)(hidden, weights.embed.T * np.float32(0.1))


def _places(cache: jax.Array, page_table: jax.Array, positions: jax.Array, there: jax.Array) -> jax.Array:
    """Returns the places of tokens in the flat cache; out of range for padding."""
    number, size = cache.shape[:2]
    page = jnp.take_along_axis(page_table, positions // size, axis=1)
    return jnp.where(there, page * size + positions % size, number * size).reshape(-1)


def _write(cache: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[places].set(new.reshape(-1, *new.shape[2:]), mode="drop").reshape(cache.shape)


def _plain_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    query_seq_lengths: jax.Array,
) -> jax.Array:
    keys, values = (
        pages[page_table].reshape(len(page_table), -1, *pages.shape[2:]) for pages in (key_pages, value_pages)
    )
    seen = lengths - query_seq_lengths
    position = seen[:, None] + jnp.arange(query.shape[1])
    mask = jnp.arange(keys.shape[1])[None, None] <= position[:, :, None]
    return jax.nn.dot_product_attention(query, keys, values, mask=mask[:, None])
