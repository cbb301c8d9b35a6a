"""The online softmax of 64 rows: a block of scores, the merge of splits, the result.

`pallas_kernels.contract.SplitAttentionContract` states the formulas; every kernel of attention on Hopper takes its
steps from here, so that prefill and decode cannot differ.
"""

import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import LEAST, SplitAttentionContract
from pallas_kernels.parts.hopper.tile import ROWS, Arithmetic, across, add_to_lanes, filled

LN2: Final = float(np.float32(math.log(2)))


class Stats(NamedTuple):
    """The largest score so far, in units of log2, and the sum of 2 ** (score - maximum); (rows,) float32 each."""

    maximum: jax.Array
    total: jax.Array


def no_keys() -> Stats:
    """Returns the state before any key."""
    return Stats(filled((ROWS,), LEAST), filled((ROWS,), 0))


def weigh(
    scores: jax.Array, stats: Stats, factor: float, contract: SplitAttentionContract, math_: Arithmetic
) -> tuple[Stats, jax.Array, jax.Array]:
    """Takes a block of raw scores (64, keys) into the state.

    Returns:
        The state, whose total is that of the lane alone, the decay (64,) of what was summed before, and the weights
        (64, keys), float32.
    """
    maximum = jnp.maximum(stats.maximum, scores.max(axis=1) * factor)
    weights = math_.exp2(math_.fused(scores, factor, across(-maximum, scores.shape[1])))
    decay = math_.exp2(stats.maximum - maximum)
    total = add_to_lanes(stats.total, decay, weights, contract.sum_chains, math_.interpret)
    return Stats(maximum, total), decay, weights


class Factors(NamedTuple):
    """What a split is merged with.

    Attributes:
        kept: Factor of the values and of the total of all before it.
        taken: Factor of the split's values.
        total: The split's total times its factor.
    """

    kept: jax.Array
    taken: jax.Array
    total: jax.Array


def factors_of_split(before: jax.Array, split: Stats, math_: Arithmetic) -> tuple[jax.Array, Factors]:
    """Returns the largest score up to a split, and what the split is merged with.

    Args:
        before: The largest score before the split.
        split: The state of the split, lanes added.
        math_: The instructions.
    """
    maximum = jnp.maximum(before, split.maximum)
    kept, taken = math_.exp2(before - maximum), math_.exp2(split.maximum - maximum)
    return maximum, Factors(kept, taken, math_.product(split.total, taken))


def merge_stats(all_before: Stats, split: Stats, math_: Arithmetic) -> tuple[Stats, jax.Array, jax.Array]:
    """Merges the state of a split, lanes added, into that of the splits before it.

    Returns:
        The merged state, and the factors of the values before and of the split's values.
    """
    maximum, (kept, taken, total) = factors_of_split(all_before.maximum, split, math_)
    return Stats(maximum, math_.fused(all_before.total, kept, total)), kept, taken


def of_queries(stats: Stats, query: jax.Array, queries: Any, wrong: Any = None) -> Stats:
    """Returns the stats of rows, a total of 0 for those that are no queries; nan for all where their sequence is wrong.

    Args:
        stats: (rows,) each.
        query: int32, the query of each row, (rows,), or of all.
        queries: Queries of the sequence; negative if what the caller gave for it is out of range.
        wrong: Whether its page table is; None if there is none.
    """
    bad = queries < 0 if wrong is None else wrong | (queries < 0)
    there = query < queries
    total = jnp.where(there if there.shape else jnp.full(stats.total.shape, there), stats.total, 0.0)
    return stats._replace(total=total + jnp.where(bad, math.nan, 0.0).astype(jnp.float32))


def result(values: jax.Array, stats: Stats, sink: jax.Array | None, math_: Arithmetic) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs (rows, n) and the log-sum-exp (rows,), float32; zeros and -inf for a total of 0.

    Args:
        values: (rows, n) float32, weighted values.
        stats: Of all splits, from `of_queries`.
        sink: (rows,) float32, a score in units of ln(2) that has no value; None without sinks.
        math_: The instructions.
    """
    columns = values.shape[1]
    # +0, or nan for a row with anything that is not finite: a sum of negative zeros is made positive.
    poisoned = math_.fused(math_.scaled(values, 0.0).sum(axis=1), 1.0, 0.0)
    merged, factor = stats, None
    if sink is not None:
        maximum = jnp.maximum(stats.maximum, sink)
        factor = math_.exp2(stats.maximum - maximum)
        merged = Stats(maximum, math_.fused(stats.total, factor, math_.exp2(sink - maximum)))
    inverse = math_.reciprocal(merged.total)
    factor = inverse if factor is None else math_.product(factor, inverse)
    out = math_.fused(values, across(factor, columns), across(poisoned, columns))
    out = jnp.where(across(stats.total, columns) != 0, out, 0.0)
    lse = math_.scaled(merged.maximum + math_.log2(merged.total), LN2) + poisoned
    return out, jnp.where(stats.total != 0, lse, -jnp.inf)
