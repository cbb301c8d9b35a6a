"""How the channels of a convolution are divided into heads."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Heads:
    """Heads of queries, keys and values, in this order, among the channels of a convolution.

    Attributes:
        keys: Heads of the queries, and as many of the keys.
        values: Heads of the values.
        width: Channels of a head of queries and keys.
        value_width: Channels of a head of values.
        eps: Added to the sum of the squares of a head of queries or keys before it is divided by its length.
    """

    keys: int
    values: int
    width: int
    value_width: int
    eps: float

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return 2 * self.keys * self.width + self.values * self.value_width

    def split(self, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the channels y (B, T, channels) as queries, keys and values (B, T, heads, width)."""
        of_keys, tokens = self.keys * self.width, y.shape[:2]
        query, key, value = jnp.split(y, [of_keys, 2 * of_keys], axis=-1)
        query, key = (x.reshape(*tokens, self.keys, self.width) for x in (query, key))
        return query, key, value.reshape(*tokens, self.values, self.value_width)

    @property
    def of_norm(self) -> dict[str, float]:
        """The parameters of `rms_norm` that divide a row by its length."""
        width = max(self.width, 1)
        return {"eps": self.eps / width, "offset": float(np.float32(width**-0.5))}
