"""The XLA programs of attention for any GPU, on a CPU: which keys they take, from where; bits are a GPU's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.attention import cpu, portable
from pallas_kernels.attention.call import OF_SCORES, AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.schedule.portable import attention_tile, gradient_tile
from pallas_kernels.contract import QUERY_BLOCK, attention_contract
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.attention.reference import visible_keys
from tests.eight_bits import composed

KEYS, HEADS, KEY_HEADS, SIZE = 50, 4, 2, 24
CONTRACT = attention_contract(fused=False)


def random(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, CT = (random(seed, 2, 20, HEADS, SIZE) for seed in (0, 3))
K, V = (random(seed, 2, KEYS, KEY_HEADS, SIZE) for seed in (1, 2))
OFFSETS, USED, LENGTHS = (jnp.array(x, jnp.int32) for x in ([30, 20], [20, 17], [50, 37]))
LAUNCH: dict[str, Any] = {"contract": CONTRACT}
LIMITS = jnp.stack([OFFSETS, USED, LENGTHS], axis=1)
BIAS = random(4, 1, HEADS, 20, KEYS)
MASK = random(5, 2, 1, 1, KEYS) > -1


@jax.jit
def attend(query: jax.Array, key: jax.Array, value: jax.Array, **optional: jax.Array) -> tuple[jax.Array, jax.Array]:
    call = AttentionCall(query, key, value, LIMITS, AttentionOptions(0.2, causal=True), **optional)
    return portable.attention(call, **LAUNCH)


@pytest.mark.tier("full")
@pytest.mark.parametrize("case", ["window", "bias and mask"])
def test_results_and_gradients(case: str) -> None:
    arrays = {} if case == "window" else {"bias": BIAS, "mask": MASK}
    window = (9, 3) if case == "window" else None
    visible = np.stack(
        [
            visible_keys(20, KEYS, causal=True, window=window, offset=o, query_length=t, key_length=s)
            for o, t, s in zip(OFFSETS.tolist(), USED.tolist(), LENGTHS.tolist(), strict=True)
        ]
    )[:, None] & np.asarray(arrays.get("mask", True))

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
        found = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.2 + arrays.get("bias", 0)
        weights = jax.nn.softmax(found, axis=-1, where=visible)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(visible, weights, 0), v)

    out, pull = jax.vjp(expected, Q, K, V)
    call = AttentionCall(Q, K, V, LIMITS, AttentionOptions(0.2, causal=True, window=window), **arrays)
    found, lse = portable.attention(call, **LAUNCH)
    gradients = portable.gradients(call, AttentionResults(found, lse, CT), **LAUNCH)
    for ours, right in zip((found, *gradients), (out, *pull(CT)), strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.tier("full")
def test_cap_sinks_slopes_and_values_of_another_width() -> None:
    q, k, v, ct = (x.astype(jnp.bfloat16) for x in (Q, K, V[..., :8], CT[..., :8]))
    slopes, sinks = jnp.array([[0.1, 0.2, 0.3, 0.4]]), random(6, 1, HEADS)
    position = OFFSETS[:, None] + jnp.arange(20)
    distance = (jnp.arange(KEYS) - position[..., None])[:, None]
    seen = (distance <= 0) & (jnp.arange(KEYS) < LENGTHS[:, None, None, None])
    seen &= (jnp.arange(20) < USED[:, None])[:, None, :, None] & MASK

    def expected(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
        found = 2 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.1) + bias + slopes[:, :, None, None] * distance
        column = jnp.broadcast_to(sinks[:, :, None, None], (2, HEADS, 20, 1))
        found = jnp.concatenate([jnp.where(seen, found, -jnp.inf), column], axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(found, axis=-1)[..., :-1], v)

    options = AttentionOptions(0.2, causal=True, soft_cap=2.0)
    call = AttentionCall(q, k, v, LIMITS, options, bias=BIAS, mask=MASK, alibi_slopes=slopes, sinks=sinks)

    @jax.jit
    def run() -> Any:
        out, lse = portable.attention(call, **LAUNCH)
        own, results = call.only(*OF_SCORES), AttentionResults(out, lse, ct)
        of_bias = portable.score_gradients(own, results, **LAUNCH).sum(0, keepdims=True)
        return out, *portable.gradients(own, results, **LAUNCH), of_bias

    out, pull = jax.vjp(expected, *(x.astype(jnp.float32) for x in (q, k, v)), BIAS)
    for ours, right in zip(run(), (out, *pull(ct.astype(jnp.float32))), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), right, atol=3e-2)


@pytest.mark.tier("full")
def test_values_that_are_columns_of_the_keys() -> None:
    """The results and gradients of values that are an array of their own."""
    q, k, ct = Q.astype(jnp.bfloat16), K.astype(jnp.bfloat16), CT[..., :8].astype(jnp.bfloat16)

    @jax.jit
    def run(value: jax.Array | None) -> Any:
        options = AttentionOptions(0.2, causal=True, latent_value_size=8 if value is None else None)
        call = AttentionCall(q, k, value, LIMITS, options)
        out, lse = portable.attention(call, **LAUNCH)
        return out, lse, *portable.gradients(call, AttentionResults(out, lse, ct), **LAUNCH)

    assert_bits_equal(run(None), run(k[..., :8]))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_keys_and_values_of_8_bits(dtype: str) -> None:
    q = Q.astype(jnp.bfloat16)
    k, v = ((20 * x).astype(dtype) for x in (K, V))
    shape = (1, KEY_HEADS, SIZE if dtype == "int8" else 1)
    factors = [jnp.exp(random(seed, *shape)) / 20 for seed in (7, 8)]
    found = attend(q, k, v, key_scale=factors[0], value_scale=factors[1])
    expected = composed(attend, q, (k, v), factors, heads=False)
    assert_bits_equal(found, expected)


@pytest.mark.tier("full")
def test_pages_and_what_is_not_seen() -> None:
    whole = attend(Q, K, V)
    table = jnp.array([[3, 1, 9, 0, 5], [2, 4, 6, 8, 7]])
    pages = (jnp.zeros((10, 10, KEY_HEADS, SIZE)).at[table].set(x.reshape(2, 5, 10, KEY_HEADS, SIZE)) for x in (K, V))
    assert_bits_equal(attend(Q, *pages, page_table=table), whole)
    poisoned = (x.at[1, 37:].set(jnp.nan) for x in (K, V))
    assert_bits_equal(attend(Q, *poisoned), whole)
    # A value that is infinite makes its column infinite, in the results of the queries that see it.
    out, lse = attend(Q, K, V.at[0, 40, 0, 3].set(jnp.inf))
    assert_bits_equal((out, lse), (whole[0].at[0, 10:, :2, 3].set(jnp.inf), whole[1]))
    assert (np.asarray(whole[1][1, 17:]) == -np.inf).all()
    assert not np.asarray(whole[0][1, 17:]).any()


def test_empty_arrays() -> None:
    out, lse = portable.attention(AttentionCall(Q[:0], K[:0], V[:0], LIMITS[:0], AttentionOptions(0.2)), **LAUNCH)
    assert out.shape == (0, 20, HEADS, SIZE)
    assert lse.shape == (0, 20, HEADS)


def test_another_contract_is_refused() -> None:
    call = AttentionCall(Q, K, V, LIMITS, AttentionOptions(1.0))
    with pytest.raises(UnsupportedError, match=r"attention/v1/f32-rounded-keys128-online"):
        portable.attention(call, contract=attention_contract())
    with pytest.raises(UnsupportedError, match=r"attention/v1/f32-keys128-online"):
        cpu.attention(call, contract=CONTRACT)


def test_tiles_hold_a_part_of_a_large_batch() -> None:
    """Whatever the batch, a program takes some rows at once, and a whole number of blocks of queries going back."""
    for batch, queries, heads in ((1, 1, 32), (4096, 1, 32), (4, 100_000, 128), (2, 7, 300_000)):
        tile = attention_tile(batch, queries, heads)
        assert 1 <= tile.sequences <= batch
        assert 1 <= tile.queries <= queries
        assert tile.sequences * tile.queries * heads <= max(1 << 17, heads)
        assert gradient_tile(queries, heads).queries % QUERY_BLOCK == 0
