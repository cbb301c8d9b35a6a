"""The key/value cache: where tokens go, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from flax_layers.models.layers import KVCache, LayerCache
from tests.arrays import on_device

SIZES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 3}


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal((batch, length, 2, 3)), jnp.float32)


def test_contiguous_write() -> None:
    cache = KVCache.contiguous(batch=3, capacity=8, **SIZES).layer(1)
    new = tokens(3, 4)
    written = jax.jit(LayerCache.write)(cache, new, -new, jnp.array([0, 5, 2]), jnp.array([4, 3, 0]))
    expected = np.zeros((3, 8, 2, 3), np.float32)
    expected[0, :4], expected[1, 5:] = new[0], new[1, :3]
    assert_bits_equal(written.keys, expected)
    assert_bits_equal(written.values, np.where(expected == 0, expected, -expected))


def test_paged_write() -> None:
    table = [[3, 0, 5], [1, 4, 2]]
    cache = KVCache.paged(table, num_pages=7, page_size=4, **SIZES).layer(0)
    assert cache.capacity == 12
    new = tokens(2, 6)
    written = jax.jit(LayerCache.write)(cache, new, -new, jnp.array([6, 3]), jnp.array([6, 2]))
    rows = np.zeros((2, 12, 2, 3), np.float32)
    rows[0, 6:], rows[1, 3:5] = new[0], new[1, :2]
    expected = np.zeros((7, 4, 2, 3), np.float32)
    for sequence, pages in enumerate(table):
        for index, page in enumerate(pages):
            expected[page] = rows[sequence, 4 * index : 4 * index + 4]
    assert_bits_equal(written.keys, expected)


@pytest.mark.parametrize("paged", [False, True])
def test_what_does_not_fit_is_not_written(paged: bool) -> None:
    """Nothing wraps round into another sequence or page."""
    cache = (
        KVCache.paged([[1, 0], [3, 2]], num_pages=4, page_size=3, **SIZES)
        if paged
        else KVCache.contiguous(batch=2, capacity=6, **SIZES)
    ).layer(0)
    new = tokens(2, 4)
    written = cache.write(new, new, jnp.array([4, 9]), jnp.array([4, 4]))
    assert int((written.keys != 0).any(axis=(2, 3)).sum()) == 2


def test_sizes() -> None:
    cache = KVCache.contiguous(batch=2, capacity=8, dtype=jnp.bfloat16, **SIZES)
    assert (cache.batch, cache.capacity, len(cache.keys)) == (2, 8, 2)
    assert cache.keys[0].dtype == jnp.bfloat16
    assert cache.page_table is None
    paged = KVCache.paged(np.zeros((2, 3), np.int64), num_pages=1, page_size=8, **SIZES)
    assert (paged.batch, paged.capacity) == (2, 24)
    assert paged.page_table is not None
    assert paged.page_table.dtype == jnp.int32


def test_errors() -> None:
    with pytest.raises(ValueError, match="must not be negative, got num_layers=2"):
        KVCache.contiguous(batch=2, capacity=-1, **SIZES)
    with pytest.raises(ValueError, match="pages from 0 to 3, got pages from 0 to 4"):
        KVCache.paged([[0, 4]], num_pages=4, page_size=8, **SIZES)
    with pytest.raises(ValueError, match="pages from 0 to 3, got pages from -1 to 2"):
        KVCache.paged([[2, -1]], num_pages=4, page_size=8, **SIZES)
    with pytest.raises(ValueError, match=r"pages of each\), got \(2,\)"):
        KVCache.paged([0, 1], num_pages=4, page_size=8, **SIZES)
    with pytest.raises(TypeError, match="integers, got float64"):
        KVCache.paged([[0.0]], num_pages=4, page_size=8, **SIZES)
