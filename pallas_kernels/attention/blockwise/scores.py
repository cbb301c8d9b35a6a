"""Scores of queries and keys: what is added to them, a mask, and the soft cap. An operand of scores is read here."""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.mask_bounds import MaskBounds
from pallas_kernels.attention.programs import WITH_KEYS, dot
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.parts.xla.lanes import run_flat
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate
from pallas_kernels.parts.xla.where import where


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
    def of(cls, call: AttentionCall, offsets: jax.Array) -> "ScoreArrays":
        """Returns the arrays of a call whose first queries are at `offsets`, (B,) int32."""
        if call.alibi_slopes is None:
            return cls(call.bias, call.mask)
        position = offsets[:, None] + jnp.arange(call.query.shape[1], dtype=jnp.int32)
        slopes = call.alibi_slopes.astype(jnp.float32)[:, :, None, None]
        return cls(call.bias, call.mask, slopes, position[:, None, :, None])

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return any(x is not None for x in self)

    def padded(self, front: int, back: int, keys: int) -> "ScoreArrays":
        """Returns the arrays with padding queries before and after, and whole blocks of keys."""

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


def seen_keys(rows: MaskBounds, start: jax.Array, keys: int, mask: jax.Array | None) -> jax.Array:
    """Returns (b, 1, R, keys) bool, or (b, K, R, keys) with a mask: which keys of a block each row sees."""
    position = lax.add(start, lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys), 3))
    first, last = (x[:, None, :, None] for x in rows)
    seen = lax.bitwise_and(lax.ge(position, first), lax.lt(position, last))
    return seen if mask is None else seen & mask


class Scores(NamedTuple):
    """Scores (b, K, R, keys) of a block, as the softmax takes them.

    Attributes:
        masked: Scaled, capped and biased, -inf where a key is not seen.
        bent: The hyperbolic tangents of the soft cap; None without one.
    """

    masked: jax.Array
    bent: jax.Array | None


def block_scores(
    query: jax.Array,
    keys: jax.Array,
    seen: jax.Array,
    start: jax.Array,
    factor: jax.Array,
    arrays: ScoreArrays,
    soft_cap: float | None,
    *,
    fused: bool,
    crossed: bool = False,
) -> Scores:
    """Returns the scores of R rows and the keys of a block.

    Args:
        query: (b, K, R, H) float32.
        keys: (b, n, K, H) float32.
        seen: What each row sees.
        start: Absolute position of the block, int32.
        factor: Of the products, float32: `AttentionOptions.factor`.
        arrays: Of the rows and keys, (b, K, R, n).
        soft_cap: That of the call.
        fused: As in the contract.
        crossed: As in `Tile`.
    """
    raw = dot(query, keys, WITH_KEYS, fused=fused, crossed=crossed)
    if soft_cap is None and arrays.bias is None and arrays.slopes is None:
        return Scores(isolate(where(seen, lax.mul(raw, factor), -np.inf))[0], None)
    # After a barrier a product is rounded before the sum.
    (scores,) = isolate(lax.mul(raw, factor))
    bent = None
    if soft_cap is not None:
        (bent,) = run_flat(lambda x: (jnp.tanh(x),), scores)
        (scores,) = isolate(bent * isolate(jnp.float32(soft_cap))[0])
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(jnp.float32)
    if arrays.slopes is not None and arrays.position is not None:
        position = start + lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys.shape[1]), 3)
        scores = scores + isolate(arrays.slopes * (position - arrays.position).astype(jnp.float32))[0]
    return Scores(isolate(where(seen, scores, -np.inf))[0], bent)
