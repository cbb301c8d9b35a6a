"""The sum and its norm in one kernel, on a GPU: the bits and gradients of the two apart."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.ops.norm.norms import add_rms_norm
from bijax.parallel import tree_sum
from bijax.testing import assert_bits_equal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(3, 2048), (4096, 2048), (70, 576)])
def test_the_bits_of_the_two_apart(shape: tuple[int, int], dtype: str) -> None:
    x, y, g, g_sum = (jax.random.normal(jax.random.key(seed), shape).astype(dtype) for seed in range(4))
    weight = jax.random.normal(jax.random.key(4), shape[1:]).astype(dtype)

    def apart(x: jax.Array, y: jax.Array, weight: jax.Array) -> Any:
        h = x + y
        return h, bijax.rms_norm(h, weight)

    def run(function: Any) -> Any:
        out, pull = jax.vjp(function, x, y, weight)
        return out, pull((g_sum, g))

    found, expected = (jax.tree.leaves(jax.jit(run, static_argnums=0)(f)) for f in (add_rms_norm, apart))
    for a, b in zip(found, expected, strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("backend", ["hopper", "jax_triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(3, 2048), (4096, 2048), (70, 576), (2, 128256)])
def test_a_wide_residual_is_rounded_first(shape: tuple[int, int], dtype: str, backend: str) -> None:
    x, total = (3 * jax.random.normal(jax.random.key(seed), shape) for seed in range(2))
    x, total = x.astype(dtype), total.at[0, :3].set(jnp.array([jnp.inf, 1e38, 1e-40]))
    weight = jax.random.normal(jax.random.key(4), shape[1:]).astype(dtype)
    with bijax.prefer_backend(backend):
        found = jax.jit(add_rms_norm)(x, total, weight)
        expected = jax.jit(add_rms_norm)(x, tree_sum(total[None], dtype=dtype), weight)
    for a, b in zip(found, expected, strict=True):
        assert_bits_equal(a, b)
