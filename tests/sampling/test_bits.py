"""The bits of a row do not depend on the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.sampling import Sampled, _draw, multinomial_with_seed, sample, seed_words
from bijax.sampling._arithmetic import Arithmetic
from bijax.testing import assert_bits_equal
from tests.tiers import full_only

ROWS, COLUMNS = 257, 333


@functools.cache
def arguments() -> dict[str, np.ndarray]:
    """Rows of every kind: filters on and off, greedy, biased, with bans, nan and infinities."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((ROWS, COLUMNS)) * rng.choice([0.1, 1, 30], (ROWS, 1))).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # ties
    logits[11, 5], logits[13, 6] = np.nan, np.inf
    logits[17] = -np.inf
    logits[19] *= 1e-40
    pick = functools.partial(rng.choice, size=ROWS)
    return {
        "logits": logits,
        "seeds": seed_words(rng.integers(-(2**63), 2**63, ROWS)),
        "positions": rng.integers(0, 5000, ROWS).astype(np.int32),
        "temperature": pick([0, 0, 0.3, 1, 1.7]).astype(np.float32),
        "top_k": pick([0, 1, 5, 40]).astype(np.int32),
        "top_p": pick([1, 0.9, 0.3]).astype(np.float32),
        "min_p": pick([0, 0, 0.1]).astype(np.float32),
        "repetition_penalty": pick([1, 1, 1.3]).astype(np.float32),
        "frequency_penalty": pick([0, 0, 0.7]).astype(np.float32),
        "presence_penalty": pick([0, -0.4]).astype(np.float32),
        "prompt_mask": rng.random((ROWS, COLUMNS)) < 0.1,
        "output_counts": rng.integers(0, 3, (ROWS, COLUMNS)).astype(np.int32),
        "logit_bias": (rng.random((ROWS, COLUMNS)) < 0.01).astype(np.float32),
        "allowed": rng.random((ROWS, COLUMNS)) < 0.95,
    }


@functools.partial(jax.jit, static_argnames="batch_invariant")
def run(given: dict[str, Any], batch_invariant: bool = True) -> Sampled:
    return sample(**given, num_top=4, batch_invariant=batch_invariant)


@functools.cache
def everything(batch_invariant: bool = True) -> Sampled:
    return jax.tree.map(np.asarray, run(arguments(), batch_invariant))


def rows(index: Any) -> dict[str, np.ndarray]:
    return {name: array[index] for name, array in arguments().items()}


@pytest.mark.parametrize("batch", [33, *(full_only(n) for n in (1, 2, 3, 5, 8, 16, 64, 127, 128, 129, 200, 256))])
def test_rows_have_the_same_bits_in_any_batch(batch: int) -> None:
    order = np.random.default_rng(batch).permutation(ROWS)
    for start in (0, 64, 128):
        index = order[start : start + batch]
        found = run(rows(index))
        for ours, theirs in zip(found, everything(), strict=True):
            assert_bits_equal(np.asarray(ours), theirs[index])


def test_plain_operations_do_not() -> None:
    theirs = everything(batch_invariant=False).sampled_logprobs
    alone = [run(rows(slice(i, i + 1)), batch_invariant=False).sampled_logprobs[0] for i in range(20, 60)]
    assert (np.array(alone).view(np.int32) != theirs[20:60].view(np.int32)).any()


@pytest.mark.tier("full")
def test_a_filter_that_is_off_leaves_no_trace() -> None:
    """A row without filters, penalties and biases has the bits of a program that has none of them."""
    neutral = rows(slice(20, 60))
    for name, off in {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}.items():
        neutral[name] = np.full_like(neutral[name], off)
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        neutral[name] = np.zeros_like(neutral[name])
    neutral["allowed"] = np.ones_like(neutral["allowed"])
    few = {name: neutral[name] for name in ("logits", "seeds", "positions", "temperature")}
    mixed = {name: np.concatenate([neutral[name], rows(slice(60, 80))[name]]) for name in neutral}
    for ours, theirs in zip(run(mixed), run(few), strict=True):
        assert_bits_equal(np.asarray(ours)[:40], np.asarray(theirs))


def test_rows_without_a_token() -> None:
    found = everything()
    assert found.tokens[11] == found.tokens[17] == -1
    assert np.isnan(found.logprobs[[11, 17]]).all()
    assert (found.tokens >= 0).sum() >= ROWS - 3


def test_log_probabilities_are_those_of_log_softmax() -> None:
    from bijax import log_softmax

    logits, found = arguments()["logits"], everything()
    logprobs = np.asarray(log_softmax(logits))
    index = np.flatnonzero(found.tokens >= 0)
    assert_bits_equal(found.logprobs[index], logprobs[index, found.tokens[index]])
    assert_bits_equal(found.top_logprobs[index], np.take_along_axis(logprobs, found.top_tokens, 1)[index])


@pytest.mark.tier("full")
@functools.partial(jax.jit, static_argnames="shape")
def trained(logits: jax.Array, tokens: jax.Array, temperature: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The log-probabilities in docs/serving.md, for another arrangement of the rows."""
    logits, tokens, temperature = logits.reshape(*shape, -1), tokens.reshape(shape), temperature.reshape(*shape, 1)
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    scores = bijax.elementwise(lambda x, m, t: (x - m) / t)(logits, largest, temperature)
    return jnp.take_along_axis(bijax.log_softmax(scores), tokens[..., None], axis=-1).reshape(-1)


def test_a_trainer_at_the_temperature_of_the_sampler() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((24, 500)) * 4).astype(np.float32)
    temperature = rng.choice(np.float32([0.3, 0.7, 1, 1.7]), 24)
    given = {"seeds": np.arange(24), "positions": np.arange(24), "temperature": temperature}
    found = run({"logits": logits, **given})
    for shape in ((24,), (4, 6)):
        assert_bits_equal(trained(logits, found.tokens, temperature, shape), found.sampled_logprobs)
    divided = bijax.log_softmax(logits / temperature[:, None])[np.arange(24), found.tokens]
    assert (np.asarray(divided) != np.asarray(found.sampled_logprobs)).any()


def test_multinomial_with_seed_in_any_batch() -> None:
    p = np.asarray(jax.nn.softmax(jnp.asarray(arguments()["logits"][20:120])))
    seeds, positions = np.arange(100), np.arange(100)[::-1].copy()
    every = np.asarray(multinomial_with_seed(p, seeds, positions))
    assert_bits_equal(np.asarray(multinomial_with_seed(p[50:51], seeds[50:51], positions[50:51])), every[50:51])


@pytest.mark.tier("full")
def test_wide_rows_are_drawn_like_narrow_ones() -> None:
    """A CPU draws them one by one."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((5, _draw._WIDE), np.float32)
    logits[3, 7] = np.nan
    given = (
        logits,
        np.array([0, 0.7, 1.3, 1, 0], np.float32),
        seed_words(list(range(5))),
        np.arange(5, dtype=np.uint32),
    )
    tokens = jax.jit(_draw._composed)(*given)[0]
    assert_bits_equal(tokens, jax.jit(lambda *rows: _draw._anywhere(*rows, Arithmetic()))(*given))
    assert tokens[0] == logits[0].argmax()
    assert (tokens[3], tokens[1] == logits[1].argmax()) == (-1, False)
