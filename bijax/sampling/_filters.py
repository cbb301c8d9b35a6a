"""Which tokens may be sampled: top-k, top-p and min-p, without sorting.

A threshold is found by halving the range of scores, one pass over the row for each bit. The sums of a pass add
non-negative numbers in a fixed order, so they never grow when terms are taken away, and the threshold is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.sampling._arithmetic import Arithmetic, element
from bijax.sampling._order import smallest

_KEY_BITS = 31


class Filters(NamedTuple):
    """The filters of rows; None where no row has one.

    Attributes:
        top_k: (R,) int32; 0 keeps all.
        top_p: (R,) float32; 1 keeps all.
        min_p: (R,) float32; 0 keeps all.
    """

    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None


def keep(scores: jax.Array, filters: Filters, arithmetic: Arithmetic) -> jax.Array:
    """Returns which tokens are kept, (R, V) bool, of scores (R, V) of which the largest of each row is 0.

    A filter that no row of the batch has on is skipped; for a row that has it off it does nothing.
    """
    # Scores are at most 0: the bits of their magnitude are in the order of falling probability.
    keys = lax.bitcast_convert_type(scores, jnp.int32) & np.int32(2**31 - 1)
    kept: jax.Array = jnp.isfinite(scores)
    if filters.top_k is not None:
        k = filters.top_k[:, None]
        kept = lax.cond((k > 0).any(), _top_k, lambda kept, *_: kept, kept, keys, k)
    if filters.top_p is not None or filters.min_p is not None:
        weights = arithmetic.each(_weight, scores)
    if filters.top_p is not None:

        def top_p(kept: jax.Array, keys: jax.Array, weights: jax.Array, p: jax.Array) -> jax.Array:
            return _top_p(kept, keys, weights, p, arithmetic)

        p = filters.top_p[:, None]
        kept = lax.cond((p < 1).any(), top_p, lambda kept, *_: kept, kept, keys, weights, p)
    if filters.min_p is not None:
        kept = kept & (weights >= filters.min_p[:, None])
    return kept


def _top_k(kept: jax.Array, keys: jax.Array, k: jax.Array) -> jax.Array:
    """Keeps the k most probable tokens, the lower ones first among equals."""
    rows, columns = keys.shape

    def count(chosen: jax.Array) -> jax.Array:
        return jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.int32)

    k = jnp.where(k > 0, jnp.minimum(k, np.int32(columns)), np.int32(columns))
    threshold = smallest(lambda t: count(keys <= t) >= k, _KEY_BITS, rows)
    equal = keys == threshold
    room = k - count(keys < threshold)
    index = jnp.arange(columns, dtype=jnp.int32)[None]

    def first(equal: jax.Array) -> jax.Array:
        bits = max(1, (columns - 1).bit_length())
        last = smallest(lambda t: count(equal & (index <= t)) >= room, bits, rows)
        return equal & (index <= last)

    some: jax.Array = lax.cond((count(equal) > room).any(), first, lambda equal: equal, equal)
    return kept & ((keys < threshold) | some)


def _top_p(kept: jax.Array, keys: jax.Array, weights: jax.Array, p: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Keeps each token of which the more probable ones have together a probability below p."""
    weights = jnp.where(kept, weights, np.float32(0))
    wanted = p * arithmetic.sum(weights)

    def reached(t: jax.Array) -> jax.Array:
        enough = arithmetic.sum(jnp.where(keys <= t, weights, np.float32(0))) >= wanted
        return (enough & (p < 1)) | (t == np.int32(2**31 - 1))

    return kept & (keys <= smallest(reached, _KEY_BITS, keys.shape[0]))


@element
def _weight(score: jax.Array) -> jax.Array:
    return jnp.exp(score)
