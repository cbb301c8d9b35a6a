"""Integers and choices against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.sampling import Sampled, multinomial_with_seed, sample, seed_words
from bijax.sampling._noise import random_words
from bijax.sampling._order import first_largest, ordered

COLUMNS = 300


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox-4x32 with 7 rounds, in Python's integers."""
    (k, m), (a, b, c, d) = key, counter
    for _ in range(7):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = second >> 32 ^ b ^ k, second % 2**32, first >> 32 ^ d ^ m, first % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def test_random_words_are_philox() -> None:
    pi = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0  # a vector of its authors
    assert philox(pi[4:], pi[:4]) == (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)
    seeds, positions = seed_words([7, 2**40 + 3, -1]), [0, 5, 2**31 - 1]
    words = np.asarray(random_words(jnp.asarray(seeds), jnp.asarray(positions, jnp.uint32), 2 * COLUMNS))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions, strict=True)):
        for column in range(0, 2 * COLUMNS, 7):
            drawn = philox(seed, (column // 512 * 128 + column % 128, position, 0, 0))
            assert words[row, column] == drawn[column // 128 % 4]


def test_random_words_do_not_depend_on_the_vocabulary() -> None:
    seeds, positions = jnp.asarray(seed_words([9])), jnp.array([3], jnp.uint32)
    assert (random_words(seeds, positions, 77) == random_words(seeds, positions, COLUMNS)[:, :77]).all()


def test_order() -> None:
    x = np.array([-np.inf, -1, -1e-45, -0.0, 0.0, 1e-45, 1, np.inf, np.nan], np.float32)
    keys = np.asarray(ordered(jnp.asarray(x)))
    assert (np.sign(np.diff(keys)) == [1, 1, 1, 0, 1, 1, 1, 1]).all()
    rows = np.array([[0, 2, 2], [-0.0, 0, -1], [-np.inf] * 3, [1, np.nan, 2]], np.float32)
    assert first_largest(jnp.asarray(rows)).tolist() == [1, 0, -1, -1]


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p"])
def test_filters_keep_what_sorting_keeps(option: str) -> None:
    rng = np.random.default_rng(1)
    rows = 12
    logits = np.round(rng.normal(0, 2, (rows, COLUMNS)), 1).astype(np.float32)  # many ties
    value = {
        "top_k": np.arange(rows, dtype=np.int32) * 23,
        "top_p": np.linspace(0.05, 1, rows, dtype=np.float32),
        "min_p": np.linspace(0, 1, rows, dtype=np.float32),
    }[option]
    order = np.argsort(-logits, axis=1, kind="stable")
    p = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    kept = np.zeros((rows, COLUMNS), bool)
    doubtful = np.zeros((rows, COLUMNS), bool)
    for row in range(rows):
        if option == "top_k":
            kept[row, order[row, : value[row] or COLUMNS]] = True
        elif option == "min_p":
            kept[row] = p[row] >= value[row]
        else:
            share = p[row] / p[row].sum()
            before = np.array([share[logits[row] > x].sum() for x in logits[row]])
            kept[row] = (before < value[row]) | (value[row] == 1)
            doubtful[row] = abs(before - value[row]) < 1e-6
    assert doubtful.sum() < 5
    neutral = {"top_k": np.zeros(rows, np.int32), "top_p": np.ones(rows, np.float32), "min_p": np.zeros(rows)}
    drawn = [_draw(logits, np.full(rows, i), **(neutral | {option: value})) for i in range(60)]
    for tokens, logprobs in drawn:
        assert np.take_along_axis(kept | doubtful, tokens[:, None], 1).all()
        expected = np.log(p[np.arange(rows), tokens] / np.where(kept, p, 0).sum(1))
        assert (abs(logprobs - expected) < 1e-5)[~doubtful.any(1)].all()


@jax.jit
def _jitted(logits: jax.Array, positions: jax.Array, **filters: jax.Array) -> Sampled:
    return sample(logits, seeds=jnp.arange(len(logits)), positions=positions, **filters)


def _draw(logits: np.ndarray, positions: np.ndarray, **filters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = _jitted(logits, positions, **filters)
    return np.asarray(found.tokens), np.asarray(found.sampled_logprobs)


def test_multinomial_with_seed_is_the_documents_function() -> None:
    rng = np.random.default_rng(0)
    rows, columns = 200, 50
    p = rng.dirichlet(np.ones(columns), rows).astype(np.float32)
    seed = rng.integers(-(2**31), 2**31, rows)
    position = rng.integers(0, 2**40, rows)  # the products leave 64 bits
    with np.errstate(over="ignore"):
        step = (seed * np.int64(19349663)) ^ (position * np.int64(73856093))
        hashed = (step[:, None] * np.int64(8589934591)) ^ (np.arange(columns) * np.int64(479001599))
    uniform = (hashed % 2**24) / 2**24
    gumbel = -np.log(-np.log(uniform + 1e-9) + 1e-9)
    scores = np.log(p.astype(np.float64) + 1e-9) + gumbel
    found = np.asarray(multinomial_with_seed(p, seed, position))
    assert found.shape == (rows, 1)
    best = scores.max(1)
    chosen = np.take_along_axis(scores, found, 1)[:, 0]
    assert (best - chosen < 1e-4).all()
    assert (found[:, 0] == scores.argmax(1)).mean() > 0.98
    # Seeds of 32 bits multiply in 32 bits in PyTorch: the low 24 bits are the same.
    assert (np.asarray(multinomial_with_seed(p, seed.astype(np.int32), position)) == found).all()
