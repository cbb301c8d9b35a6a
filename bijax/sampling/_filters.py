"""Which tokens may be sampled: top-k, top-p and min-p, without sorting.

A threshold is found by halving the range of scores, one pass over the row for each bit. The sums of a pass add
non-negative numbers in a fixed order, so removing terms never increases them, and the threshold is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.sampling._arithmetic import Arithmetic, element
from bijax.sampling._order import smallest
from pallas_kernels.parts.xla.manual_axes import vary_alike

_LARGEST = np.int32(2**31 - 1)
_TOP_K, _TIES, _TOP_P = range(3)


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
    """Returns which tokens are kept, (R, V) bool, from scores (R, V) whose largest in each row is 0.

    A filter that no row of the batch has on is skipped; for a row that has it off it does nothing.
    """
    rows = scores.shape[0]
    k = jnp.zeros((rows, 1), jnp.int32) if filters.top_k is None else filters.top_k[:, None]
    p = jnp.ones((rows, 1), jnp.float32) if filters.top_p is None else filters.top_p[:, None]
    kept: jax.Array = jnp.isfinite(scores)
    weights = arithmetic.each(_weight, scores)
    if filters.top_k is not None or filters.top_p is not None:

        def top(kept: jax.Array, scores: jax.Array, weights: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
            return _top(kept, scores, weights, k, p, arithmetic)

        kept = lax.cond(((k > 0) | (p < 1)).any(), top, lambda kept, *_: kept, kept, scores, weights, k, p)
    if filters.min_p is not None:
        kept = kept & (weights >= filters.min_p[:, None])
    return kept


def _top(
    kept: jax.Array, scores: jax.Array, weights: jax.Array, k: jax.Array, p: jax.Array, arithmetic: Arithmetic
) -> jax.Array:
    """Keeps the k most probable tokens, the lower ones first among equals, and then those that top-p keeps.

    Both, and the place of the last one among equals, are the smallest number up to which weights sum to enough, so
    that one loop of a program does all three.
    """
    # Scores are at most 0: the bits of their magnitude are in the order of falling probability.
    keys = lax.bitcast_convert_type(scores, jnp.int32) & _LARGEST
    index = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
    one, nothing = np.float32(1), np.float32(0)

    def phase(which: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kept, threshold = carry
        ties = keys == threshold
        numbers = jnp.where(which == _TIES, index, keys)
        summed = jnp.where(
            which == _TOP_K, one, jnp.where(which == _TIES, ties.astype(jnp.float32), jnp.where(kept, weights, nothing))
        )
        total = arithmetic.sum(summed)
        room = k - jnp.sum(keys < threshold, axis=-1, keepdims=True, dtype=jnp.int32)
        wanted = jnp.where(which == _TOP_P, p * total, jnp.where(which == _TOP_K, k, room).astype(jnp.float32))
        on = jnp.where(which == _TOP_P, p < 1, (k > 0) & (wanted < total))

        def search(numbers: jax.Array, summed: jax.Array, wanted: jax.Array, on: jax.Array) -> jax.Array:
            def reached(t: jax.Array) -> jax.Array:
                enough = arithmetic.sum(jnp.where(numbers <= t, summed, nothing)) >= wanted
                return (enough & on) | (t == _LARGEST)

            return smallest(reached, numbers[:, :1])

        def skip(numbers: jax.Array, *_: jax.Array) -> jax.Array:
            return vary_alike((numbers, jnp.full((numbers.shape[0], 1), _LARGEST)))[1]

        found: jax.Array = lax.cond(on.any(), search, skip, numbers, summed, wanted, on)
        below = jnp.where(which == _TIES, (keys < threshold) | (ties & (index <= found)), keys <= found)
        # Ties are only known after the first phase.
        return jnp.where(which == _TOP_K, kept, kept & below), found

    start = tuple(vary_alike((kept, jnp.full((keys.shape[0], 1), _LARGEST))))
    last: tuple[jax.Array, jax.Array] = lax.fori_loop(np.int32(0), np.int32(3), phase, start)
    return last[0]


@element
def _weight(score: jax.Array) -> jax.Array:
    return jnp.exp(score)
