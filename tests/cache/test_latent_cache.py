"""Stores into caches of latents: what a loop writes, nothing else; what leads outside is refused or reported."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device, ones, zeros

WIDTH, SIZE, BLOCKS = 3, 4, 7
TABLE = np.array([[5, 1, 6], [0, 3, 2]], np.int32)


def normal(seed: int, *shape: int, dtype: Any = "bfloat16") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def written(latents: Any, cache: Any, ids: Any, past: Any, lengths: Any, table: Any, scale: Any) -> np.ndarray:
    """The cache after a loop over the tokens."""
    found = np.array(cache)
    for b, (slot, start, length) in enumerate(zip(ids, past, lengths, strict=True)):
        for i in range(length):
            row = np.asarray(latents[b, i], np.float32)
            if scale is not None:
                row = np.clip(np.round(row / np.broadcast_to(np.asarray(scale), row.shape)), -127, 127)
            at = divmod(start + i, found.shape[1])
            found[table[slot, at[0]], at[1]] = row.astype(found.dtype)
    return found


@pytest.mark.tier("full", fast=("int8-False",))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_a_loop_writes(dtype: str, paged: bool) -> None:
    """Sequences alone and together, with places that are traced and that are known."""
    table = TABLE if paged else np.arange(2, dtype=np.int32)[:, None]
    shape = (BLOCKS, SIZE, WIDTH) if paged else (2, 3 * SIZE, WIDTH)
    cache = on_device(np.random.default_rng(0).integers(-127, 128, shape)).astype(dtype)
    latents, scale = normal(1, 2, 6, WIDTH), jnp.asarray([0.01, 0.02, 0.03]) if dtype == "int8" else None
    ids, past, lengths = np.array([1, 0]), np.array([3, 0]), np.array([2, 5])
    lead = (table,) if paged else ()
    op: Any = bijax.store_paged_latent_cache if paged else bijax.store_latent_cache

    def store(x: jax.Array, ids: Any, past: Any, lengths: Any) -> Any:
        return op(x, *lead, cache, kv_ids=ids, kv_lens=past, q_lens=lengths, latent_scale=scale)

    expected = written(latents, cache, ids, past, lengths, table, scale)
    found, stored = jax.jit(lambda x: store(x, ids, past, lengths))(latents)
    assert_bits_equal(found, jnp.asarray(expected))
    assert stored.tolist() == [True, True]
    if dtype == "int8" and not paged:
        return
    assert_bits_equal(jax.jit(store)(latents, ids, past, lengths)[0], found)
    _, stored = jax.jit(store)(latents, ids, np.array([11, 0]), lengths)
    assert stored.tolist() == [False, True], "a traced length that leads outside is reported"


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (
            {"cache": zeros((2, 4))},
            ValueError,
            r"cache must have the dimensions \(slots, S, W\), got float32\[2,4\]",
        ),
        ({"cache": np.zeros((2, 4, WIDTH), "int32")}, TypeError, "cache must be an array of .* got int32"),
        (
            {"cache": zeros((2, 4, WIDTH), "bfloat16")},
            TypeError,
            "latents and a cache .* must share one dtype, got latents float32",
        ),
        ({"latents": zeros((1, 2, 5))}, ValueError, r"latents must have the dimensions \(B, L, 3\) or \(T, 3\)"),
        ({"cache": zeros((2, 4, WIDTH), "int8")}, ValueError, "latent_scale is needed for a cache of .* got none"),
        ({"latent_scale": ones(())}, ValueError, "latent_scale belongs to a cache of .* got one"),
        (
            {"cache": zeros((2, 4, WIDTH), "int8"), "latent_scale": ones(2)},
            ValueError,
            r"latent_scale must have the shape \(\), or \(3,\)",
        ),
        ({"kv_ids": [2]}, ValueError, r"kv_ids must be in \[0, 1\] \(the slots of the cache\), got 2"),
        ({"kv_lens": [3]}, ValueError, r"kv_lens \+ q_lens must be in \[0, 4\].*got 5"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"latents": jnp.zeros((1, 2, WIDTH)), "cache": jnp.zeros((2, 4, WIDTH)), **given}
    with pytest.raises(error, match=rf"bijax\.store_latent_cache: {match}"):
        bijax.store_latent_cache(arguments.pop("latents"), arguments.pop("cache"), **arguments)


def test_no_gradient() -> None:
    with pytest.raises(UnsupportedError, match=r"bijax\.store_latent_cache has no gradient"):
        jax.grad(lambda x: bijax.store_latent_cache(x, jnp.zeros((1, 4, WIDTH)))[0].sum())(jnp.ones((1, 2, WIDTH)))
