"""The Hopper kernels lower where 64-bit types are enabled, and the corners around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from pallas_kernels.schedule.hopper.rows import row_schedule
from pallas_kernels.schedule.hopper.softmax import online_schedule

pytestmark = pytest.mark.usefixtures("hopper")


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(f: Callable[..., jax.Array], *argnums: int) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: f(*arrays).astype(jnp.float32).sum(), argnums)


CASES = {
    "matmul": (gradient(bijax.matmul, 0, 1), (shape(64, 128), shape(128, 64))),
    "gated": (bijax.gated_matmul, (shape(64, 128), shape(128, 64), shape(128, 64))),
    "shards": (lambda x, w: bijax.matmul(x, w, split_k=4), (shape(8, 1024), shape(1024, 64))),
    "tf32": (bijax.matmul, (shape(8, 128, dtype="float32"), shape(128, 64, dtype="float32"))),
    "highest": (
        lambda x, w: bijax.matmul(x, w, precision="highest"),
        (shape(8, 128, dtype="float32"), shape(128, 64, dtype="float32")),
    ),
    "softmax, ring": (bijax.softmax, (shape(4096, 4096),)),
    "softmax, split": (bijax.softmax, (shape(4, 32000),)),
    "rms_norm": (gradient(bijax.rms_norm, 0, 1), (shape(300, 1024), shape(1024))),
    "cross_entropy": (
        gradient(bijax.softmax_cross_entropy, 0),
        (shape(300, 1024), shape(300, dtype="int32")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_with_64_bit_types(name: str) -> None:
    function, arrays = CASES[name]
    with jax.enable_x64(True):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_long_rows_have_a_schedule_at_any_number_of_rows() -> None:
    for rows in (1, 67, 100_000):
        assert online_schedule(rows, 1 << 20, 4).form == "split"
        assert not row_schedule(rows, 1 << 24, 8192, (4,), (), 0, 1).hold


@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_cotangent_of_a_float32_result_is_not_rounded(activation: str | None) -> None:
    """One that float16 cannot hold."""
    x, w = jnp.ones((2, 4), jnp.float16), jnp.full((4, 4), 1e-3, jnp.float16)

    def loss(x: jax.Array) -> jax.Array:
        return (bijax.matmul(x, w, activation=activation, preferred_element_type=jnp.float32) * 1e5).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), 400, rtol=1e-2)


def test_the_bias_of_no_columns_has_a_gradient() -> None:
    x, w = jnp.ones((3, 8)), jnp.ones((8, 0))
    assert jax.grad(lambda b: bijax.matmul(x, w, bias=b).sum())(jnp.zeros(0)).shape == (0,)
