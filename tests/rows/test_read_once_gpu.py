"""On a Hopper GPU: gradients that read their rows once have the bits of those that read them twice."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import chunk_contract, row_contract
from pallas_kernels.norm import hopper
from pallas_kernels.schedule.hopper.norm_gradients import gradients_schedule
from tests.arrays import on_device

pytestmark = pytest.mark.gpu


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return on_device(jax.random.normal(jax.random.key(seed), shape), dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "residual"),
    [
        (520, 4096, "bfloat16", True),
        (640, 8192, "bfloat16", False),
        (513, 8192, "bfloat16", True),
        (513, 4096, "float32", False),
        (513, 8192, "float32", False),
        (2049, 4096, "bfloat16", False),
        (2049, 8192, "bfloat16", False),
        (513, 32000, "bfloat16", False),
        (2049, 32000, "bfloat16", False),
        (513, 32000, "float32", False),
        (513, 128256, "bfloat16", False),
        (520, 128256, "float32", False),
    ],
)
def test_gradients_of_rms_norm(rows: int, columns: int, dtype: str, residual: bool) -> None:
    h, g, g_sum = (normal(i, rows, columns, dtype=dtype) for i in range(3))
    factor, weight = normal(3, rows, 1, dtype="float32"), normal(4, columns, dtype=dtype)
    h = h.at[7, 5].set(jnp.inf).at[300].set(jnp.nan)
    arrays = (h, factor, g, weight, g_sum if residual else None)
    row, chunks = row_contract(), chunk_contract()
    assert gradients_schedule(rows, columns, (h.dtype.itemsize, g.dtype.itemsize))
    one = jax.jit(lambda *a: hopper.rms_norm_gradients(*a, dtype=dtype, contract=row, chunks=chunks))(*arrays)
    (dh,) = jax.jit(lambda *a: hopper.rms_norm_gradient(*a, contract=row))(*arrays)
    dw = jax.jit(lambda *a: hopper.weight_gradient(*a, contract=chunks, dtype=dtype))(h, factor, g)
    assert_bits_equal(one, (dh, dw))


@pytest.mark.parametrize(("rows", "columns", "transpose_w"), [(3001, 50257, False), (17000, 16448, True)])
def test_loss_of_a_linear_layer(rows: int, columns: int, transpose_w: bool) -> None:
    """With a last step that is shorter, and with rows in two blocks."""
    options: dict[str, Any] = {"ignore_index": 3, "z_loss": 0.01}
    x, ct = normal(0, rows, 128), normal(1, rows, dtype="float32")
    w = normal(2, *((columns, 128) if transpose_w else (128, columns)))
    labels = jax.random.randint(jax.random.key(3), (rows,), 0, columns).at[5].set(3)

    def pair(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = bijax.matmul(x, w, transpose_w=transpose_w, preferred_element_type=jnp.float32)
        return bijax.softmax_cross_entropy(logits, labels, **options)

    def fused(x: jax.Array, w: jax.Array) -> jax.Array:
        return bijax.linear_cross_entropy(x, w, labels, transpose_w=transpose_w, **options)

    def with_gradients(f: Any) -> Any:
        def both(x: jax.Array, w: jax.Array) -> Any:
            y, pull = jax.vjp(f, x, w)
            return y, pull(ct)

        return jax.jit(both)(x, w)

    assert_bits_equal(with_gradients(fused), with_gradients(pair))
