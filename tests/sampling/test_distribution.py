"""Samples follow their distributions, and draws are independent of each other."""

import numpy as np
import pytest

from bijax.sampling import multinomial_with_seed
from tests.sampling.draws import CASES, COLUMNS, LOGITS, chi_square, distribution, draw

FEW, MANY = 20_000, 1_000_000
LIMIT = 5.0
"""Standard deviations. Draws are the same in every run, so a test that passes passes again."""


@pytest.mark.tier(
    "full", fast=("plain-20000", "temperature-20000", "top_k-20000", "top_p-20000", "frequency-20000", "presence-20000")
)
@pytest.mark.parametrize("draws", [FEW, MANY])
@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_distribution(case: str, draws: int) -> None:
    tokens = np.concatenate(
        [draw(np.arange(FEW) + start, np.full(FEW, 3), **CASES[case]) for start in range(0, draws, FEW)]
    )
    assert chi_square(tokens, distribution(**CASES[case])) < LIMIT


def test_the_test_tells_distributions_apart() -> None:
    tokens = draw(np.arange(FEW), np.full(FEW, 3), temperature=1.0)
    assert chi_square(tokens, distribution(temperature=0.9)) > LIMIT


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.full(FEW, 42), np.arange(FEW)),
        (np.arange(FEW), np.full(FEW, 0)),
        (np.arange(FEW) << 32, np.full(FEW, 7)),
        (np.arange(FEW) << 24, np.full(FEW, 7)),
        (np.arange(FEW), np.arange(FEW)),
    ],
    ids=["positions", "seeds", "high words", "multiples of 2**24", "seeds and positions"],
)
def test_neighbouring_draws_are_independent(seeds: np.ndarray, positions: np.ndarray) -> None:
    tokens = draw(seeds, positions)
    p = distribution()
    assert chi_square(tokens, p) < LIMIT
    pairs = tokens[:-1] * COLUMNS + tokens[1:]
    assert chi_square(pairs[::2], np.outer(p, p).ravel()) < LIMIT


def test_what_the_hash_of_the_seed_document_does() -> None:
    """Its noise is not independent between columns: samples are far from the distribution."""
    p = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()
    inputs = np.broadcast_to(p.astype(np.float32), (FEW, COLUMNS))
    tokens = np.asarray(multinomial_with_seed(inputs, np.full(FEW, 42), np.arange(FEW)))[:, 0]
    assert chi_square(tokens, p) > 10 * LIMIT
    again = np.asarray(multinomial_with_seed(inputs, np.full(FEW, 42 + 2**24), np.arange(FEW)))[:, 0]
    assert (again == tokens).all()  # seeds that differ by a multiple of 2**24 are one seed
