"""What layers with attention over a cache have in common: appending tokens in two steps."""

from abc import abstractmethod

import jax

from .cache import LayerCache
from .unrounded import Unrounded


class CachedAttention:
    """A layer that appends tokens to a cache, in one call or in two, between which another layer can compute."""

    def extend(
        self,
        x: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        cache: LayerCache,
        *,
        start: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array | Unrounded, LayerCache]:
        """Appends tokens to sequences in a cache, and attends to all tokens up to each.

        Args:
            x: (B, T, features), the new tokens, each sequence padded at its end.
            rotary: Cosines and sines (B, T, half of the rotated width of a head) of the tokens' positions.
            cache: The tokens before.
            start: (B,) integers: tokens that each sequence holds in the cache.
            lengths: (B,) integers from 0 to T: new tokens of each sequence.

        Returns:
            (B, T, features), and the cache with the new tokens. The result is undefined past `lengths`.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If a shape does not fit, or the cache is that of another kind of attention.
        """
        query, cache = self.prepare(x, rotary, cache, start=start, lengths=lengths)
        return self.attend(x, query, cache, start=start, lengths=lengths), cache

    @abstractmethod
    def prepare(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], cache: LayerCache, **places: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        """Computes what `extend` does before scores: returns rotated queries, and the cache with the new tokens."""

    @abstractmethod
    def attend(self, x: jax.Array, query: jax.Array, cache: LayerCache, **places: jax.Array) -> jax.Array | Unrounded:
        """Computes the rest of `extend` from what `prepare` returned for x."""
