"""The merge of splits on Hopper: factors that are found side by side against one split after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._merge_loop import padded_splits
from pallas_kernels.attention.hopper._online import Stats, merge_stats
from pallas_kernels.attention.hopper._scores import Scoring
from pallas_kernels.attention.hopper._setup import Setup
from pallas_kernels.attention.hopper.merge import merge
from pallas_kernels.contract import LEAST, SplitAttentionContract
from pallas_kernels.parts.hopper.tile import Arithmetic, across
from tests.mosaic import interpreter
from tests.tiers import full_only

SIZE = 64
PARAMETERS = interpreter()


def one_by_one(values: np.ndarray, stats: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """The weighted values (R, H) of the splits from `begin` to `stop`, divided by their total."""
    rows, math = values.shape[1], Arithmetic(interpret=True)
    merged = Stats(jnp.full(rows, LEAST, jnp.float32), jnp.zeros(rows, jnp.float32))
    total = jnp.zeros((rows, SIZE), jnp.float32)
    for split in range(begin, stop):
        merged, kept, taken = merge_stats(merged, Stats(*jnp.asarray(stats[:, :, split])), math)
        total = total * across(kept, SIZE) + jnp.asarray(values[split]) * across(taken, SIZE)
    return np.asarray(jnp.where(across(merged.total, SIZE) != 0, total / across(merged.total, SIZE), 0))


@pytest.mark.parametrize(("splits", "spans"), [full_only(3, [(0, 3), (1, 2)]), (150, [(0, 150), (37, 141)])])
def test_splits_are_merged_upwards(splits: int, spans: list[tuple[int, int]]) -> None:
    rng, room = np.random.default_rng(0), padded_splits(splits)
    values = rng.standard_normal((2, splits, 4, SIZE)).astype(np.float32)
    stats = np.full((2, 2, 4, room), np.nan, np.float32)
    stats[:, 0, :, :splits] = 8 * rng.standard_normal((2, 4, splits))
    stats[:, 1, :, :splits] = rng.uniform(1, 50, (2, 4, splits))
    stats[0, :, 1, 0] = LEAST, 0  # a split of which a row sees nothing
    for sequence, (begin, stop) in enumerate(spans):  # what was not computed leaves no trace
        values[sequence, :begin] = values[sequence, stop:] = np.nan
        stats[sequence, :, :, :begin] = stats[sequence, :, :, stop:] = np.nan

    def span(offset: Any, _: Any, keys: Any) -> tuple[Any, Any]:
        return offset, keys

    limits = np.array([(begin, 1, stop) for begin, stop in spans], np.int32)
    options = AttentionOptions(1.0, causal=True)
    setup = Setup(
        SplitAttentionContract(),
        Scoring.of(options),
        MaskBounds.of(options),
        KeySource(128),
        batch=2,
        queries=1,
        heads=4,
        group=4,
        size=SIZE,
        value_size=SIZE,
        capacity=1024 * splits,
        unit=1.0,
        interpret=PARAMETERS,
    )
    given: dict[str, Any] = {"setup": setup, "rows": 4, "dtype": jnp.float32, "splits_of": span}

    def run(values: jax.Array, stats: jax.Array, limits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return merge(values, stats, AttentionCall(values, values, values, limits, options), **given)

    out, lse = jax.jit(run)(values, stats, limits)
    assert np.isfinite(lse).all()
    for sequence, (begin, stop) in enumerate(spans):
        expected = one_by_one(values[sequence], stats[sequence], begin, stop)
        np.testing.assert_allclose(out[sequence], expected, rtol=2e-6, atol=1e-7)
        weights = stats[sequence, 1, :, begin:stop] * 2.0 ** stats[sequence, 0, :, begin:stop].astype(np.float64)
        np.testing.assert_allclose(lse[sequence], np.log(weights.sum(axis=1)), rtol=1e-5)
