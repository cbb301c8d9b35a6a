"""Attention by the arguments of an engine: the numbers of the oracle, and one token's bits in prefill and decode."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.operators import oracles
from tests.tiers import full_only

HEADS, KEYS, WIDTH, SIZE, BLOCKS = 4, 2, 8, 4, 72
PAST, NEW = np.array([5, 0, 9], np.int32), np.array([3, 4, 1], np.int32)
# The first three blocks of a sequence hold its tokens; with the others there is room for more than 64 keys.
TABLE = np.concatenate(
    [np.random.default_rng(0).permutation(12).reshape(4, 3), np.arange(12, BLOCKS).reshape(4, 15)], axis=1
).astype(np.int32)
IDS = np.array([2, 0, 3], np.int32)


def normal(seed: int, *shape: int, dtype: Any = "bfloat16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype))


def caches(quantised: bool) -> tuple[dict[str, Any], list[list[np.ndarray]]]:
    """Returns caches in blocks with their scales, and the keys and values of each sequence that lie in them."""
    arrays: dict[str, Any] = {}
    rows: list[list[np.ndarray]] = [[], []]
    for i, name in enumerate("kv"):
        cache = normal(i, BLOCKS, KEYS, SIZE, WIDTH)
        wide = cache
        if quantised:
            scale = jnp.exp(normal(2 + i, KEYS, WIDTH, dtype="float32")) / 64
            cache = np.random.default_rng(i).integers(-127, 128, cache.shape).astype(np.int8)
            arrays[f"{name}_scale"] = scale
            wide = (oracles.wide(cache) * oracles.wide(scale)[:, None]).astype(oracles.BF16)
        arrays[f"{name}_cache"] = cache
        rows[i] = [np.asarray(wide)[TABLE[s]].swapaxes(1, 2).reshape(-1, KEYS, WIDTH) for s in IDS]
    return arrays, rows


@contextlib.contextmanager
def strict() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize(
    ("quantised", "every"),
    [(False, False), full_only(False, True), full_only(True, False)],
    ids=["bfloat16", "bfloat16, in every form", "int8"],
)
def test_prefill_and_decode(quantised: bool, every: bool) -> None:
    arrays, (keys, values) = caches(quantised)
    q = normal(5, int(NEW.sum()) + 2, HEADS, WIDTH)
    whole = jax.jit(lambda q, **lengths: bijax.flash_attention_prefill(q, TABLE, **arrays, **lengths, max_q_len=4))
    y = np.asarray(whole(q, q_lens=NEW, kv_lens=PAST, kv_ids=IDS))
    assert y.dtype == jnp.bfloat16
    ends = np.cumsum(NEW)
    for b, end in enumerate(ends):
        own = slice(end - NEW[b], end)
        expected = oracles.attend(q[own], keys[b], values[b], PAST[b])
        np.testing.assert_allclose(np.asarray(y[own], np.float64), expected, rtol=0.02, atol=0.02)
    assert not np.asarray(y[ends[-1] :], np.float32).any()

    one = jax.jit(lambda q, past, ids: bijax.flash_attention_decode(q, TABLE, **arrays, kv_lens=past, kv_ids=ids))
    for step in range(4):
        here = np.flatnonzero(step < NEW)
        at = np.where(step < NEW, ends - NEW + step, 0)
        # All sequences at once; those that have ended look at their first token again.
        with strict():
            found = np.asarray(one(q[at][:, None], np.where(step < NEW, PAST + step, PAST), IDS))[:, 0]
        assert_bits_equal(found[here], y[at[here]], err_msg=f"step {step}")
    # Traced numbers out of range.
    bad = whole(q, q_lens=NEW, kv_lens=np.array([5, 18 * SIZE - 3, 9]), kv_ids=np.array([2, 0, 7]))
    assert np.isnan(np.asarray(bad, np.float32)).any(axis=(1, 2)).tolist() == [False] * 3 + [True] * 5 + [False] * 2
    if not every:
        return
    # Alone, from known numbers, padded, and by accumulated lengths.
    alone = bijax.flash_attention_prefill(q[None, 3:7], TABLE, **arrays, kv_ids=IDS[1:2])
    assert_bits_equal(alone[0], y[3:7])
    sums = np.concatenate([[0], ends]).astype(np.int32)
    packed = bijax.flash_attention_decode(q, TABLE, **arrays, kv_lens=PAST, kv_ids=IDS, accum_q_len=sums, q_seq_len=4)
    assert_bits_equal(packed, y)


@pytest.mark.tier("full")
@pytest.mark.parametrize("every", [False, full_only(True)], ids=["bits", "every form"])
def test_whole_sequences_and_decoding(every: bool) -> None:
    qkv, lengths = normal(0, 2, 9, HEADS + 2 * KEYS, WIDTH), {"q_head_num": HEADS, "kv_head_num": KEYS}
    q, k, v = np.split(qkv, [HEADS, HEADS + KEYS], axis=2)
    run = jax.jit(lambda *x: bijax.flash_attention(*x))
    y = np.asarray(run(q, k, v))
    for b in range(2):
        expected = oracles.attend(q[b], k[b], v[b], 0)
        np.testing.assert_allclose(np.asarray(y[b], np.float64), expected, rtol=0.02, atol=0.02)
    if every:
        with strict():
            assert_bits_equal(jax.jit(lambda x: bijax.flash_attention(qkv=x, **lengths))(qkv), y)
        assert (np.asarray(bijax.flash_attention(q, k, v, is_causal=False)) != np.asarray(y)).any()
    caches = (np.pad(x, ((0, 1), (0, 0), (0, 0), (0, 0))).swapaxes(1, 2)[:, :, :8] for x in (k, v))
    decode = jax.jit(
        lambda k_cache, v_cache, x, past: bijax.flash_decoding(k_cache, v_cache, qkv=x, **lengths, kv_lens=past)
    )
    k_cache, v_cache = caches
    for past in (0, 3, 8):
        with strict():
            found = np.asarray(decode(k_cache, v_cache, qkv[:, past : past + 1], past))
        assert_bits_equal(found[:, 0], y[:, past])
    with strict():
        assert np.isnan(np.asarray(decode(k_cache, v_cache, qkv[:, :1], 9), np.float32)).all()


def test_plain_jax_differs() -> None:
    """The control: a query alone and in a whole sequence."""
    q, k, v = (normal(i, 1, 300, 4, 64, dtype="float32") for i in range(3))
    plain = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))
    assert (np.asarray(plain(q, k, v)[:, 7:8]) != np.asarray(plain(q[:, 7:8], k, v))).any()


X = np.zeros((1, 2, HEADS, WIDTH), np.float32)
SMALL = np.arange(12, dtype=np.int32).reshape(4, 3)
CACHE = np.zeros((12, KEYS, SIZE, WIDTH), np.float32)
SCALE = np.ones((KEYS, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bijax.flash_attention(X, X), ValueError, "either qkv, or q, k and v, got q and k"),
        (lambda: bijax.flash_attention(X, X, X, q_head_num=1), ValueError, "belong to qkv"),
        (lambda: bijax.flash_attention(qkv=X, q_head_num=4), ValueError, "needs q_head_num and kv_head_num"),
        (lambda: bijax.flash_attention(qkv=X, q_head_num=4, kv_head_num=1), ValueError, r"got 4 \+ 2 \* 1 heads"),
        (lambda: bijax.flash_attention(X, X[:, :1], X), ValueError, "one B and L"),
        (lambda: bijax.flash_decoding(CACHE, CACHE, X, X, X, kv_lens=1), ValueError, "k_cache must have the shape"),
        (
            lambda: bijax.flash_decoding(CACHE, CACHE, X, X[:, :, :2], X[:, :, :2], kv_lens=1),
            ValueError,
            "one new token of each sequence",
        ),
        (
            lambda: bijax.flash_decoding(CACHE, CACHE, X[:, :1], X[:, :1, :2], X[:, :1, :2], kv_lens=5),
            ValueError,
            r"kv_lens must be in \[0, 4\]",
        ),
        (lambda: bijax.flash_attention_prefill(X[0, 0], SMALL, CACHE, CACHE), ValueError, "q must have the dimensions"),
        (lambda: bijax.flash_attention_prefill(X[0], SMALL, CACHE, CACHE), ValueError, "packed tokens need q_lens"),
        (
            lambda: bijax.flash_attention_prefill(X, SMALL, CACHE.astype(np.int8), CACHE.astype(np.int8)),
            ValueError,
            "k_scale is needed",
        ),
        (
            lambda: bijax.flash_attention_prefill(X, SMALL, CACHE, CACHE, k_scale=SCALE, v_scale=SCALE),
            ValueError,
            "belongs to no other, got one",
        ),
        (
            lambda: bijax.flash_attention_prefill(X, SMALL, CACHE.astype(np.float16), CACHE),
            TypeError,
            "k_cache must be",
        ),
        (
            lambda: bijax.flash_attention_prefill(X, SMALL, CACHE, CACHE.astype(np.int8), v_scale=SCALE),
            TypeError,
            "share one dtype",
        ),
        (lambda: bijax.flash_attention_decode(X, SMALL, CACHE, CACHE, kv_lens=[11]), ValueError, "lengths must be in"),
        (lambda: bijax.flash_attention_decode(X, SMALL, CACHE, CACHE, kv_lens=[13]), ValueError, "kv_lens must be in"),
        (
            lambda: bijax.flash_attention_decode(X, SMALL, CACHE, CACHE, kv_lens=[1], kv_ids=[4]),
            ValueError,
            "kv_ids must be in",
        ),
        (
            lambda: bijax.flash_attention_decode(X, SMALL, CACHE, CACHE, kv_lens=[1], q_seq_len=1, q_lens=[2]),
            ValueError,
            "q_lens must be in",
        ),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
