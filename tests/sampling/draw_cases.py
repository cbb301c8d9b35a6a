"""Rows to draw from, and how draws are compared."""

import jax.numpy as jnp
import numpy as np

from bijax.sampling import seed_words
from bijax.sampling._noise import random_words

ROWS, COLUMNS = 9, 1300

MARGIN = 1e-4
"""Sums that are closer than this may come out in another order than in float64."""

Given = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def given(rows: int = ROWS, columns: int = COLUMNS) -> Given:
    """Logits with ties, bans, infinities and a nan; temperatures, some of them 0 or close to it."""
    rng = np.random.default_rng(rows)
    logits = (rng.standard_normal((rows, columns)) * rng.choice([0.1, 1, 5], (rows, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1, rng.integers(0, columns, 400)] = -np.inf
    logits[2, 7], logits[3, 5], logits[4], logits[5, 9] = np.nan, np.inf, -np.inf, np.nan
    temperature = rng.choice([0, 0.3, 1, 1.7], rows).astype(np.float32)
    temperature[:6] = 1, 0.7, 1, 1, 1, 0
    temperature[6:9] = 0, 1e-30, 1e5
    seeds = seed_words(rng.integers(0, 2**63, rows))
    return logits, temperature, seeds, rng.integers(0, 9999, rows).astype(np.uint32)


def wrong(tokens: np.ndarray, arguments: Given) -> list[int]:
    """Returns the rows whose token is not that of float64; where two are within the margin, either may be it."""
    logits, temperature, seeds, positions = arguments
    words = np.asarray(random_words(jnp.asarray(seeds), jnp.asarray(positions), logits.shape[1]))
    v = (words.astype(np.float64) + 0.5) / 2**32
    with np.errstate(invalid="ignore", divide="ignore"):
        sums = logits / temperature[:, None].astype(np.float64) - np.log(-np.log1p(-v))
    sums = np.where(temperature[:, None] > 0, sums, logits)
    found = []
    for row, (token, line) in enumerate(zip(tokens, sums, strict=True)):
        if np.isnan(line).any() or np.max(line) == -np.inf:
            right = token == -1
        elif temperature[row] in (0, np.float32(1e-30)):
            right = token == np.argmax(logits[row])
        else:
            right = token >= 0 and (line[token] == np.max(line) or line[token] > np.max(line) - MARGIN)
        if not right:
            found.append(row)
    return found
