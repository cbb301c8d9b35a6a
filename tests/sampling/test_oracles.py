"""Integers and choices against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from bijax.sampling import Sampled, multinomial_with_seed, sample, seed_words
from bijax.sampling._noise import random_words
from bijax.sampling._order import first_largest, ordered

COLUMNS = 300


def test_random_words_are_threefry() -> None:
    seeds, positions = seed_words([7, 2**40 + 3, -1]), np.array([0, 5, 2**31 - 1], np.uint32)
    words = np.asarray(random_words(jnp.asarray(seeds), jnp.asarray(positions), COLUMNS))
    column = np.arange(COLUMNS)
    block = (column // 256 * 128 + column % 128).astype(np.uint32)
    for row in range(3):
        # JAX's function takes the counters' first words, then their second ones.
        counters = np.concatenate([np.full(COLUMNS, positions[row], np.uint32), block])
        first, second = np.split(np.asarray(threefry_2x32(jnp.asarray(seeds[row]), jnp.asarray(counters))), 2)
        assert (words[row] == np.where(column // 128 % 2 == 0, first, second)).all()


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
