"""Latent attention of DeepSeek's width on a GPU: bits in any batch and under every schedule, and accuracy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.attention.reference import reference, visible_keys
from tests.goldens import cases

pytestmark = pytest.mark.gpu

BEFORE, TOKENS = 700, 700
"""Tokens in the cache before the queries, and the queries: of two splits."""

attend = jax.jit(functools.partial(bijax.latent_attention, value_size=512, scale=576**-0.5))


def arrays(heads: int, tokens: int = TOKENS) -> tuple[jax.Array, jax.Array]:
    query = jnp.asarray(cases.array(heads, (2, tokens, heads, 576), jnp.dtype("bfloat16")))
    return query, jnp.asarray(cases.array(1, (2, BEFORE + tokens, 576), jnp.dtype("bfloat16")))


@pytest.mark.parametrize("heads", [16, 128])
def test_bits_of_chunks_tokens_and_batches(heads: int) -> None:
    query, latents = arrays(heads)
    whole = attend(query, latents, query_offset=BEFORE)
    for start, count in ((0, 64), (448, 64), (1, 7), (511, 7), (0, 1), (63, 1), (TOKENS - 1, 1)):
        part = query[:, start : start + count]
        expected = whole[:, start : start + count]
        assert_bits_equal(attend(part, latents, query_offset=BEFORE + start), expected)
        assert_bits_equal(attend(part[1:], latents[1:], query_offset=BEFORE + start), expected[1:])
    many = attend(
        jnp.tile(query[:, -1:], (32, 1, 1, 1)), jnp.tile(latents, (32, 1, 1)), query_offset=BEFORE + TOKENS - 1
    )
    assert_bits_equal(many, jnp.tile(whole[:, -1:], (32, 1, 1, 1)))


def test_values_that_are_not_finite_reach_only_the_rows_that_see_them() -> None:
    query, latents = arrays(16)
    whole = attend(query, latents, query_offset=BEFORE)
    beside = attend(query, latents.at[1].set(jnp.nan), query_offset=BEFORE)
    assert_bits_equal(beside[:1], whole[:1])
    place = BEFORE + 300
    found = attend(query, latents.at[0, place, 7].set(jnp.inf), query_offset=BEFORE)
    assert_bits_equal(found[:, :300], whole[:, :300])
    assert not jnp.isfinite(found[0, 300:]).all(axis=(1, 2)).any()


def test_against_float64() -> None:
    query, latents = arrays(16, 100)
    found = attend(query, latents, query_offset=BEFORE)
    wide = [np.asarray(x[0], np.float64) for x in (query, latents)]
    seen = visible_keys(100, BEFORE + 100, causal=True, offset=BEFORE)
    expected, _ = reference(wide[0], wide[1][:, None], wide[1][:, None, :512], seen, 576**-0.5)
    error = np.linalg.norm(np.asarray(found[0], np.float64) - expected) / np.linalg.norm(expected)
    assert error < 4e-3
