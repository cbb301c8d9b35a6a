"""Launches as kernels of XLA's own have the bits of foreign calls: sizes, arrays updated in place, shared memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal

pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton")
from pallas_kernels.parts.jax_triton import native_calls  # noqa: E402


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def product(x: jax.Array, w: jax.Array) -> Any:
    """Tiles of this product take more than 48 KiB of shared memory, which a launch has to ask for."""
    return bijax.matmul(x, w)


def norm(x: jax.Array, w: jax.Array) -> Any:
    return bijax.rms_norm(x, w[:, 0])


def convolution(x: jax.Array, w: jax.Array) -> Any:
    state = jnp.zeros((1, 12, x.shape[1]), x.dtype)
    for start in (0, 5):
        y, state = bijax.causal_conv1d_extend(x[None, start : start + 5], w[:, :4], state=state, start=[start])
    return y, state


@pytest.mark.parametrize("function", [product, norm, convolution])
def test_bits_of_foreign_calls(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(0, 33, 1024), normal(1, 1024, 512)
    texts, results = [], []
    for versions in (((99, 0), (99, 1)), native_calls._VERSIONS):
        monkeypatch.setattr(native_calls, "_VERSIONS", versions)
        jax.clear_caches()
        with bijax.prefer_backend("jax_triton"):
            lowered = jax.jit(function).lower(x, w)
        texts.append(lowered.as_text())
        results.append(lowered.compile()(x, w))
    assert ["triton_kernel_call" in text for text in texts] == [True, False]
    assert [native_calls.TARGET in text for text in texts] == [False, True]
    jax.tree.map(assert_bits_equal, *results)
