"""The sum and its norm in one kernel, on a GPU: the bits and gradients of the two apart."""

from typing import Any

import jax
import pytest

import bijax
from bijax.ops.norm.norms import add_rms_norm
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
