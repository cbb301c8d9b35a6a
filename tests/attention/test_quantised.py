"""Caches of 8 bits: the same bits in prefill, in decode, contiguous and in pages, and those that the contract says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.eight_bits import composed
from tests.tiers import full_only

BATCH, TOKENS, HEADS, KEY_HEADS, SIZE, PAGE = 2, 140, 4, 2, 8, 10


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def stored(dtype: str) -> tuple[list[np.ndarray], dict[str, np.ndarray], list[np.ndarray]]:
    """Returns keys and values in 8 bits, as `store_kv_cache` writes them, their factors, and the products of both."""
    x = [3 * random(i, BATCH, TOKENS, KEY_HEADS, SIZE) for i in (1, 2)]
    shape = (KEY_HEADS, SIZE) if dtype == "int8" else (KEY_HEADS,)
    factors = [np.exp(random(i, *shape, dtype=jnp.float32)) / np.float32(20) for i in (3, 4)]
    empty = jnp.zeros((BATCH, KEY_HEADS, TOKENS, SIZE), dtype)
    store = jax.jit(bijax.store_kv_cache)
    *caches, written = store(*x, empty, empty, key_scale=factors[0], value_scale=factors[1])
    assert bool(written.all())
    caches = [np.swapaxes(c, 1, 2) for c in caches]
    wide = [c.astype(np.float32) * (f if f.ndim == 2 else f[:, None]) for c, f in zip(caches, factors, strict=True)]
    return caches, {"key_scale": factors[0], "value_scale": factors[1]}, wide


@pytest.mark.parametrize(
    ("dtype", "in_pages"), [("int8", False), full_only("int8", True), full_only("float8_e4m3fn", True)]
)
def test_prefill_decode_and_pages(dtype: str, in_pages: bool) -> None:
    caches, factors, _ = stored(dtype)
    q = random(0, BATCH, 12, HEADS, SIZE)
    offset = np.full(BATCH, TOKENS - 12)
    attend = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True)
    decode = jax.jit(functools.partial(attend, **factors))
    whole = tuple(np.asarray(x) for x in decode(q, *caches, query_offset=offset))
    plain = functools.partial(jax.jit(attend), query_offset=offset)
    assert_bits_equal(whole, composed(plain, q, caches, factors.values()))
    for at in (0, 11):
        one = decode(q[:, at : at + 1], *caches, query_offset=offset + at)
        assert_bits_equal(one, tuple(x[:, at : at + 1] for x in whole))
    if not in_pages:
        return
    table = np.random.default_rng(0).permutation(BATCH * TOKENS // PAGE).reshape(BATCH, -1)
    pages = [
        jnp.zeros((table.size, PAGE, KEY_HEADS, SIZE), dtype).at[table].set(c.reshape(BATCH, -1, PAGE, *c.shape[2:]))
        for c in caches
    ]
    assert_bits_equal(bijax.paged_attention(q, *pages, table, TOKENS, return_residual=True, **factors), whole)


@pytest.mark.tier("full")
def test_float64_and_vmap() -> None:
    """Factors that the mapped axis carries belong to its entries."""
    caches, factors, wide = stored("int8")
    q = random(0, BATCH, 8, HEADS, SIZE)
    out = bijax.dot_product_attention(q, *caches, **factors)
    k, v = (np.repeat(np.asarray(x, np.float64), HEADS // KEY_HEADS, axis=2) for x in wide)
    scores = np.einsum("btnh,bsnh->bnts", np.asarray(q, np.float64), k) / np.sqrt(SIZE)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-2, atol=1e-2)
    twice = [jnp.stack([f, 2 * f]) for f in factors.values()]
    found = jax.vmap(lambda q, a, b: bijax.dot_product_attention(q, *caches, key_scale=a, value_scale=b), (None, 0, 0))(
        q, *twice
    )
    assert_bits_equal(found[0], out)
    doubled = {name: 2 * f for name, f in factors.items()}
    assert_bits_equal(found[1], bijax.dot_product_attention(q, *caches, **doubled))


@pytest.mark.tier("full")
def test_what_a_cache_of_e4m3_holds() -> None:
    """Rounded to nearest even, at most 448; a quotient that is not finite is reported."""
    key = jnp.asarray([1.0625, 17.0, 1000.0, -1e9, 2**-9], jnp.float32).reshape(5, 1, 1, 1)
    empty = jnp.zeros((5, 1, 1, 1), jnp.float8_e4m3fn)
    one = jnp.ones(1)
    k, _, written = bijax.store_kv_cache(key, key, empty, empty, key_scale=one, value_scale=2 * one)
    assert k.astype(jnp.float32).ravel().tolist() == [1.0, 16.0, 448.0, -448.0, 2**-9]
    assert written.all()
    *_, written = bijax.store_kv_cache(key / 0, key, empty, empty, key_scale=one, value_scale=one)
    assert not written.any()
