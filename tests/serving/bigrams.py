"""A model without attention, for tests of what is around the model: little is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from tests.serving.fake_engine import VOCABULARY

WIDTH = 257


class Bigrams:
    """Logits, which are the hidden state too, follow from the last token and its position. Embeddings are a product.

    Args:
        invariant: Whether it computes with the operations of bijax, or with those of JAX.
    """

    vocab_size, max_length, one_program, least_common_prefix = VOCABULARY, 96, False, None

    def __init__(self, invariant: bool = True) -> None:
        self.invariant = invariant
        rng = np.random.default_rng(0)
        self.table = rng.standard_normal((VOCABULARY + self.max_length, VOCABULARY), np.float32)
        self.kernel = rng.standard_normal((VOCABULARY, WIDTH), np.float32)

    def init_pages(self, num_pages: int, page_size: int) -> Any:
        return jnp.zeros((num_pages, page_size))

    def extend(
        self,
        pages: Any,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        places = np.asarray(start)[:, None] + np.arange(tokens.shape[1])
        rows = self.table[np.asarray(tokens)] + self.table[VOCABULARY + np.minimum(places, self.max_length - 1)]
        return jnp.asarray(rows), pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def embed(self, hidden: jax.Array) -> jax.Array:
        return (bijax.matmul if self.invariant else jnp.matmul)(hidden, self.kernel)

    def plain(self) -> "Bigrams":
        return Bigrams(invariant=False)

    def with_weights(self, weights: Any) -> "Bigrams":
        return self
