"""Attention with a bias and a mask: what it means, and a query's bits in any batch, chunk and length of the cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.attention.reference import reference
from tests.tiers import full_only

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, SIZE = 3, 37, 150, 4, 2, 32


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ARRAYS = (
    random(0, BATCH, QUERIES, HEADS, SIZE),
    random(1, BATCH, KEYS, KEY_HEADS, SIZE),
    random(2, BATCH, KEYS, KEY_HEADS, SIZE),
    random(3, BATCH, QUERIES, HEADS, SIZE),
)
CASES: dict[str, dict[str, np.ndarray]] = {
    "bias": {"bias": 3 * random(4, 1, HEADS, QUERIES, KEYS)},
    "mask": {"mask": random(5, BATCH, 1, 1, KEYS) > 0},
    "both": {"bias": random(6, BATCH, 1, QUERIES, 1), "mask": random(7, HEADS, QUERIES, KEYS) > 1},
    "minus infinity": {"bias": np.where(random(8, QUERIES, KEYS) > 0, 0, -np.inf).astype(np.float32)},
}


def run(options: dict[str, Any], *arrays: Any, **more: Any) -> tuple[jax.Array, ...]:
    """The output, its log-sum-exp and the gradients of queries, keys and values."""
    q, k, v, ct = arrays

    def attend(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        return bijax.dot_product_attention(q, k, v, return_residual=True, **options, **more)

    out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return (out, lse, *pull(ct))


@functools.cache
def whole(name: str) -> tuple[jax.Array, ...]:
    return run(CASES[name], *ARRAYS)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str) -> None:
    found = whole(name)
    with jax.enable_x64(True):
        sizes = (BATCH, HEADS, QUERIES, KEYS)
        bias = np.broadcast_to(CASES[name].get("bias", np.float64(0)), sizes).astype(np.float64)
        mask = np.broadcast_to(CASES[name].get("mask", np.bool_(True)), sizes)

        def one(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
            k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=1) for x in (k, v))
            scores = jnp.einsum("tnh,snh->nts", q, k) / np.sqrt(SIZE) + bias
            return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1), v)

        wide = [jnp.asarray(x, jnp.float64) for x in ARRAYS]

        @jax.jit
        def exact(q: Any, k: Any, v: Any, ct: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: jax.vmap(one)(q, k, v, bias, mask), q, k, v)
            return (out, *pull(ct))

        expected = exact(*wide)
    for ours, right in zip((found[0], *found[2:]), expected, strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(right)).max() <= 3e-6 * np.abs(right).max()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CASES)
def test_a_sequence_alone_has_the_bits_of_the_batch(name: str) -> None:
    for i in range(BATCH):
        options = {n: x[i : i + 1] if x.ndim == 4 and len(x) > 1 else x for n, x in CASES[name].items()}
        alone = run(options, *(x[i : i + 1] for x in ARRAYS))
        assert_bits_equal(alone, tuple(x[i : i + 1] for x in whole(name)))


@pytest.mark.tier("full")
def test_chunks_and_longer_caches() -> None:
    options = CASES["both"]
    q, k, v, _ = ARRAYS
    whole = bijax.dot_product_attention(q, k, v, **options, return_residual=True)
    k, v = (np.pad(x, [(0, 0), (0, 106), (0, 0), (0, 0)], constant_values=np.nan) for x in (k, v))
    for part in (slice(0, 1), slice(1, QUERIES)):
        bias, mask = options["bias"][:, :, part], np.pad(options["mask"][:, part], [(0, 0), (0, 0), (0, 106)])
        found = bijax.dot_product_attention(q[:, part], k, v, bias, mask, return_residual=True)
        assert_bits_equal(found, tuple(x[:, part] for x in whole))


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [full_only("bias"), full_only("mask"), "both"])
def test_vmap(name: str) -> None:
    q, k, v, _ = ARRAYS
    options = CASES[name]
    axes = {n: 0 if x.ndim == 4 and len(x) > 1 else None for n, x in options.items()}
    one = {n: x[0] if x.ndim == 4 and len(x) == 1 else x for n, x in options.items()}

    def attend(q: Any, k: Any, v: Any, options: Any) -> jax.Array:
        return bijax.dot_product_attention(q, k, v, **options)

    found = jax.vmap(attend, (0, 0, 0, axes))(q, k, v, one)
    assert_bits_equal(found, attend(q, k, v, options))


@pytest.mark.tier("full")
def test_a_mask_of_nothing_seen_and_of_everything() -> None:
    q, k, v, ct = ARRAYS
    out, lse, *gradients = run({"mask": np.zeros((1, 1), bool)}, q, k, v, ct)
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
    assert all(not np.asarray(g).any() for g in gradients)
    out, lse, *_ = run({"bias": np.full((1, 1), -np.inf, np.float32)}, q, k, v, ct)
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
    plain = run({}, q, k, v, ct)
    assert_bits_equal(run({"mask": np.ones((1, 1), bool)}, q, k, v, ct), plain)


@pytest.mark.tier("full")
def test_what_is_masked_leaves_no_trace() -> None:
    q, k, v, ct = ARRAYS
    mask = np.ones((BATCH, 1, 1, KEYS), bool)
    mask[:, :, :, 7] = mask[:, :, :, 140] = False
    expected = run({"mask": mask}, q, k, v, ct)
    k, v = k.copy(), v.copy()
    k[:, 7], v[:, 140], v[:, 7] = np.nan, np.inf, -np.inf
    found = run({"mask": mask}, q, k, v, ct)
    assert_bits_equal(found[:3], expected[:3])


@pytest.mark.tier("full")
def test_causal_masks_mean_the_same() -> None:
    """The interval of a causal query and a mask of the same keys; the reference of other tests agrees."""
    q, k, v, _ = (x[:1, :QUERIES] for x in ARRAYS)
    mask = np.tril(np.ones((QUERIES, QUERIES), bool))
    found = bijax.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(found, bijax.dot_product_attention(q, k, v, is_causal=True), atol=2e-6)
    expected, _ = reference(q[0], k[0], v[0], mask, 1 / np.sqrt(SIZE))
    np.testing.assert_allclose(found[0], expected, atol=2e-6)


@pytest.mark.tier("full")
def test_the_control_differs() -> None:
    """Plain JAX under the same comparison of one query alone and among others."""
    q, k, v, _ = ARRAYS
    bias = CASES["bias"]["bias"]
    differing = 0
    for size in (1, 5, 20):
        whole, part = (
            np.asarray(jax.jit(jax.nn.dot_product_attention)(q[:, :n], k, v, bias[:, :, :n]))[:, :size]
            for n in (QUERIES, size)
        )
        differing += int((whole != part).sum())
    assert differing
