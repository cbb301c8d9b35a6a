"""The Triton kernel that draws tokens, under the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw as draw_anywhere
from pallas_kernels.contract import GumbelContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.sampling import pallas_triton as triton
from pallas_kernels.sampling.pallas_triton import draw
from pallas_kernels.sampling.schedule.pallas_triton import DrawTile
from tests.sampling.draw_cases import COLUMNS, ROWS, given, wrong


@jax.jit
def interpreted(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(draw(*arrays, tile=DrawTile(steps), interpret=True) for steps in (4, 1))


def test_tokens_are_those_of_float64() -> None:
    arguments = given()
    tokens, otherwise_cut = map(np.asarray, interpreted(*arguments))
    assert wrong(tokens, arguments) == []
    assert (tokens == otherwise_cut).all()
    assert wrong((tokens + 1) % COLUMNS, arguments) == list(range(ROWS))


@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e4])
def test_no_sum_is_above_its_bound(temperature: float) -> None:
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, 2**32, 5000), 2 ** np.arange(32), 2**32 - 2 ** np.arange(33)])
    numbers = jnp.asarray(words.astype(np.uint32)).astype(jnp.float32)
    logits = jnp.asarray(rng.standard_normal(len(words)) * rng.choice([0, 1, 1e3, 1e30, np.inf], len(words)))
    scores = logits.astype(jnp.float32) / np.float32(temperature)
    bounds, sums = (np.asarray(f(scores, numbers, True)) for f in (triton._bound, triton._add_noise))
    assert (sums <= bounds).all()
    # Where it matters, at small words, the two are close, and yet apart.
    near = (words < 2**24) & (abs(np.asarray(scores)) < 100)
    assert near.sum() > 10
    room = bounds[near] - sums[near]
    assert ((room > 0.001) & (room < 0.01)).all()


@pytest.mark.tier("full")
def test_a_nan_is_found_behind_what_nothing_is_above() -> None:
    logits = np.zeros((2, COLUMNS), np.float32)
    logits[:, 3], logits[1, 1200] = np.inf, np.nan
    words = np.zeros((2, 2), np.uint32)
    for temperature in (0, 1):
        found = draw(
            *map(jnp.asarray, (logits, np.full(2, temperature, np.float32), words, words[:, 0])),
            tile=DrawTile(4),
            interpret=True,
        )
        assert found.tolist() == [3, -1]


def test_the_portable_form_draws_the_same() -> None:
    """Where the two differ by rounding alone; they are not promised to."""
    arguments = given()
    tokens = np.asarray(draw_anywhere(*map(jnp.asarray, arguments), Arithmetic()))
    assert wrong(tokens, arguments) == []


def test_no_rows() -> None:
    assert draw(*(jnp.asarray(a[:0]) for a in given()), interpret=True).shape == (0,)


def test_another_contract_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="gumbel/v1"):
        draw(*map(jnp.asarray, given()), contract=GumbelContract(version=1), interpret=True)
