"""Many draws from few logits, and the distributions that they are to follow."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.sampling import sample, seed_words

COLUMNS = 12
LOGITS = np.random.default_rng(5).normal(0, 1.2, COLUMNS).astype(np.float32)
PROMPT = np.arange(COLUMNS) % 4 == 0
COUNTS = (np.arange(COLUMNS) % 3).astype(np.int32)
BIAS = np.where(np.arange(COLUMNS) == 7, np.float32(1.5), np.float32(0))
ALLOWED = np.arange(COLUMNS) != 2
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": np.zeros(COLUMNS, np.float32),
    "allowed": np.ones(COLUMNS, bool),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 1.1},
    "bias": {"logit_bias": BIAS},
    "allowed": {"allowed": ALLOWED},
    "all": {
        "temperature": 1.4,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": BIAS,
        "allowed": ALLOWED,
    },
}


@functools.partial(jax.jit, static_argnames="rows")
def _draw(rows: int, seeds: jax.Array, positions: jax.Array, **options: Any) -> jax.Array:
    wide = {n: jnp.broadcast_to(v, (rows, COLUMNS)) for n, v in options.items() if jnp.ndim(v) == 1}
    return sample(
        jnp.broadcast_to(LOGITS, (rows, COLUMNS)),
        seeds=seeds,
        positions=positions,
        prompt_mask=jnp.broadcast_to(PROMPT, (rows, COLUMNS)),
        output_counts=jnp.broadcast_to(COUNTS, (rows, COLUMNS)),
        need_logprobs=False,
        **(options | wide),
    ).tokens


def draw(seeds: np.ndarray, positions: np.ndarray, **options: Any) -> np.ndarray:
    """Returns a token for each seed and position. All cases are one compiled program."""
    given = NEUTRAL | options
    return np.asarray(_draw(len(seeds), seed_words(seeds), positions.astype(np.int32), **given))


def distribution(**options: Any) -> np.ndarray:
    """Returns the probabilities that `sample` is to follow, by sorting, in float64."""
    o = NEUTRAL | options
    x = LOGITS.astype(np.float64)
    seen = PROMPT | (COUNTS > 0)
    x = np.where(seen, np.where(x > 0, x / o["repetition_penalty"], x * o["repetition_penalty"]), x)
    x = x - o["frequency_penalty"] * COUNTS - o["presence_penalty"] * (COUNTS > 0) + o["logit_bias"]
    x = np.where(o["allowed"], x, -np.inf) / o["temperature"]
    order = np.argsort(-x, kind="stable")
    if o["top_k"]:
        x[order[o["top_k"] :]] = -np.inf
    p = _softmax(x)
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    x[order[before >= o["top_p"]]] = -np.inf
    p = _softmax(x)
    x[p < o["min_p"] * p.max()] = -np.inf
    return _softmax(x)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the statistic as a number of standard deviations of its distribution; impossible tokens give inf."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return float("inf")
    possible = probabilities > 0
    expected = probabilities[possible] * len(tokens)
    freedom = possible.sum() - 1
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / np.sqrt(2 * max(1, freedom)))
