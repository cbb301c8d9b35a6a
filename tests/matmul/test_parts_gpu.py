"""float32 with bfloat16 on a Hopper GPU: rows alone and in a batch, gradients of weights cut into batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops import weight_gradient
from bijax.testing import assert_bits_equal

pytestmark = pytest.mark.gpu


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(("k", "n"), [(1024, 2048), (1000, 520)])
def test_gradients_of_float32_results(k: int, n: int) -> None:
    x, w, g = normal(0, 300, k, dtype="bfloat16"), normal(1, k, n, dtype="bfloat16"), normal(2, 300, n)

    @jax.jit
    def pull(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(lambda x, w: bijax.matmul(x, w, preferred_element_type="float32"), x, w)[1](g)

    dx, dw = pull(x, w, g)
    for rows in (slice(0, 1), slice(137, 142), slice(40, 300)):
        assert_bits_equal(pull(x[rows], w, g[rows])[0], dx[rows])
    exact = [np.asarray(a, np.float64) for a in (x, w, g)]
    for found, expected in ((dx, exact[2] @ exact[1].T), (dw, exact[0].T @ exact[2])):
        assert np.abs(np.asarray(found, np.float64) - expected).max() < 0.005 * np.abs(expected).max()


def test_batches_continue_one_chain() -> None:
    x, g = normal(3, 640, 512, dtype="bfloat16"), normal(4, 640, 264)
    whole = weight_gradient(x, g)
    total = None
    for rows in (slice(0, 64), slice(64, 80), slice(80, 640)):
        total = weight_gradient(x[rows], g[rows], accumulate=total)
    assert total is not None
    assert_bits_equal(total, whole)
