"""Packed sequences: each has the bits of the sequence alone, forward and backward, contiguous and in pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.tiers import full_only

HEADS, KEY_HEADS, SIZE, TOKENS = 4, 2, 8, 11
SUMS = np.array([0, 5, 5, 10], np.int32)  # the second sequence is empty, and there is a token of padding
KEY_SUMS = np.array([0, 135, 138, 273], np.int32)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Q, CT = random(0, TOKENS, HEADS, SIZE), random(3, TOKENS, HEADS, SIZE)
K, V = random(1, 275, KEY_HEADS, SIZE), random(2, 275, KEY_HEADS, SIZE)
OFFSETS = np.diff(KEY_SUMS) - np.diff(SUMS)


def results(attend: Any, *arrays: Any) -> tuple[Any, ...]:
    """The output and its log-sum-exp; given a cotangent too, the gradients of queries, keys and values."""
    attend = functools.partial(attend, return_residual=True)
    if len(arrays) == 3:
        return tuple(attend(*arrays))
    out, pull, lse = jax.vjp(attend, *arrays[:3], has_aux=True)
    return (out, lse, *pull(arrays[3]))


def packed(sums: Any, key_sums: Any, *arrays: Any, **longest: int) -> Any:
    attend = functools.partial(
        bijax.dot_product_attention,
        is_causal=True,
        query_offset=OFFSETS,
        cu_query_seq_lengths=sums,
        cu_key_value_seq_lengths=key_sums,
        **longest,
    )
    return results(attend, *arrays)


run = jax.jit(functools.partial(packed, max_query_seq_length=6, max_key_value_seq_length=140))


@pytest.mark.parametrize(
    ("arrays", "sequences"), [((Q, K, V), (0,)), full_only((Q, K, V, CT), (0, 2))], ids=["results", "and gradients"]
)
def test_each_sequence_has_the_bits_of_its_own(arrays: tuple[np.ndarray, ...], sequences: tuple[int, ...]) -> None:
    found = run(SUMS, KEY_SUMS, *arrays)
    alone = jax.jit(
        lambda *arrays, offset: results(
            functools.partial(bijax.dot_product_attention, is_causal=True, query_offset=offset), *arrays
        )
    )
    for i in sequences:
        own, keys = (slice(*s[i : i + 2]) for s in (SUMS, KEY_SUMS))
        parts = (own, keys, keys, own)
        expected = alone(*(x[s] for x, s in zip(arrays, parts, strict=False)), offset=OFFSETS[i : i + 1])
        assert_bits_equal(tuple(x[s] for x, s in zip(found, (own, own, own, keys, keys), strict=False)), expected)
    out, lse, *gradients = (np.asarray(x) for x in found)
    assert not out[10:].any()
    assert (lse[10:] == -np.inf).all()
    for x, others in zip(gradients, ([10], [135, 136, 137, 273, 274], [135, 136, 137, 273, 274]), strict=False):
        assert not x[others].any()
    # Traced lengths that do not add up.
    for sums, key_sums in (([0, 7, 7, 10], KEY_SUMS), ([1, 5, 5, 10], KEY_SUMS), (SUMS, [0, 140, 160, 290])):
        wrong = run(np.asarray(sums, np.int32), np.asarray(key_sums, np.int32), *arrays)
        assert all(np.isnan(np.asarray(x)).all() for x in wrong[:2])


@pytest.mark.tier("full")
def test_pages() -> None:
    """Packed queries on pages have the bits of packed queries on packed keys, and of each sequence alone."""
    page, table = 16, np.random.default_rng(0).permutation(27).reshape(3, 9)
    pages = [np.zeros((27, page, KEY_HEADS, SIZE), np.float32) for _ in "kv"]
    lengths = np.diff(KEY_SUMS)
    for pool, x in zip(pages, (K, V), strict=True):
        for i, length in enumerate(lengths):
            whole = np.zeros((9 * page, KEY_HEADS, SIZE), np.float32)
            whole[:length] = x[KEY_SUMS[i] : KEY_SUMS[i + 1]]
            pool[table[i]] = whole.reshape(9, page, KEY_HEADS, SIZE)
    attend = jax.jit(functools.partial(bijax.paged_attention, return_residual=True))
    found = attend(Q, *pages, table, lengths, cu_query_seq_lengths=SUMS)
    assert_bits_equal(found, run(SUMS, KEY_SUMS, Q, K, V))
    for i in (0, 2):
        own = slice(*SUMS[i : i + 2])
        alone = attend(Q[None, own], *pages, table[i : i + 1], lengths[i : i + 1])
        assert_bits_equal(tuple(x[0] for x in alone), tuple(x[own] for x in found))


@pytest.mark.tier("full")
def test_self_attention_and_no_sequences() -> None:
    k, v = K[:TOKENS], V[:TOKENS]
    found = bijax.dot_product_attention(Q, k, v, cu_query_seq_lengths=SUMS)
    alone = bijax.dot_product_attention(Q[5:10], k[5:10], v[5:10])
    assert_bits_equal(found[5:10], alone)
    assert not np.asarray(bijax.dot_product_attention(Q, k, v, cu_query_seq_lengths=[0])).any()


def test_the_control_differs() -> None:
    """Plain JAX, with a mask of the sequences: a sequence has other bits in a pack than alone."""
    sequence = np.repeat([0, 1], [100, 175])
    attend = jax.jit(jax.nn.dot_product_attention)
    q = random(4, 275, HEADS, SIZE)
    whole = attend(q, K, V, mask=jnp.asarray(sequence[:, None] == sequence)[None])
    assert (np.asarray(whole)[100:] != np.asarray(attend(q[100:], K[100:], V[100:]))).any()
