"""What is given for every pair of a query and a key: a bias of the scores, a mask, slopes along the distance."""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.tiles import FROM_ZERO
from pallas_kernels.schedule.cpu.attention import Tile


class ScoreArrays(NamedTuple):
    """Arrays (B or 1, N or 1, T or 1, S or 1), or None.

    Attributes:
        bias: Added to the scaled scores.
        mask: bool, false where a query does not see a key.
        slopes: What is added to the scores for each step from the query's position to the key's.
        position: int32, absolute positions of the queries, where there are slopes.
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    slopes: jax.Array | None = None
    position: jax.Array | None = None

    @classmethod
    def of(
        cls,
        query: jax.Array,
        offsets: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        slopes: jax.Array | None,
    ) -> "ScoreArrays":
        """Returns the arrays of a call: queries (B, T, N, H), the first ones at `offsets`, and slopes (B or 1, N)."""
        if slopes is None:
            return cls(bias, mask)
        position = offsets[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)
        return cls(bias, mask, slopes.astype(jnp.float32)[:, :, None, None], position[:, None, :, None])

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return any(x is not None for x in self)

    def padded(self, front: int, back: int, keys: int) -> "ScoreArrays":
        """Returns the arrays with further queries before and behind, and whole blocks of keys."""

        def pad(x: jax.Array) -> jax.Array:
            queries = (front, back) if x.shape[2] > 1 else (0, 0)
            return jnp.pad(x, [(0, 0), (0, 0), queries, (0, -x.shape[3] % keys if x.shape[3] > 1 else 0)])

        return ScoreArrays(*(None if x is None else pad(x) for x in self))

    def block(self, first: jax.Array, begin: jax.Array, start: jax.Array, tile: Tile) -> "ScoreArrays":
        """Returns what belongs to a tile of padded queries and its keys.

        Args:
            first: The tile's first sequence.
            begin: Its first query.
            start: Position of its first key.
            tile: How many there are of each.
        """

        def part(x: jax.Array) -> jax.Array:
            for axis, (place, size) in enumerate(
                ((first, tile.sequences), (None, 0), (begin, tile.queries), (start, tile.keys))
            ):
                if place is not None and x.shape[axis] > 1:
                    x = lax.dynamic_slice_in_dim(x, place, size, axis, **FROM_ZERO)
            return x

        return ScoreArrays(*(None if x is None else part(x) for x in self))

    def by_rows(self, heads: int, tile: Tile, query_heads: int, rows: int) -> "ScoreArrays":
        """Returns the arrays of a tile as (b, K, R, keys), each head of a query in the row that it has elsewhere."""

        def arrange(x: jax.Array) -> jax.Array:
            group = query_heads // heads
            x = jnp.broadcast_to(x, (tile.sequences, query_heads, tile.queries, tile.keys))
            x = x.reshape(tile.sequences, heads, group, tile.queries, tile.keys).swapaxes(2, 3)
            x = x.reshape(tile.sequences, heads, tile.queries * group, tile.keys)
            return jnp.pad(x, [(0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)])

        return ScoreArrays(*(None if x is None else arrange(x) for x in self))


NOTHING: Final = ScoreArrays()
