"""Products of float32 by bfloat16 in parts, under Mosaic's interpreter: accuracy, rows, and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import PartsChunkContract, PartsContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper import parts
from tests.arrays import on_device

INTERPRET = plgpu.InterpretGPUParams()


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.tier("full")
@pytest.mark.parametrize("count", [2, 3])
def test_accuracy_of_rows_in_parts(count: int) -> None:
    x, w = normal(0, 32, 80), normal(1, 80, 64, dtype="bfloat16")
    y = parts.matmul(x, w, contract=PartsContract(count), interpret=INTERPRET)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))
    bound = {2: 2.0**-16, 3: 2.0**-22}[count]
    assert (np.abs(y - exact) / scale).max() < bound
    assert_bits_equal(parts.matmul(x[7:8], w, contract=PartsContract(count), interpret=INTERPRET), y[7:8])


@pytest.mark.tier("full")
def test_weights_in_parts_and_a_bias() -> None:
    x, w, bias = normal(2, 9, 64, dtype="bfloat16"), normal(3, 24, 64), normal(4, 24)
    y = parts.matmul(x, w, contract=PartsContract(3), transpose_w=True, bias=bias, interpret=INTERPRET)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-5)


@pytest.mark.tier("full")
def test_gradient_of_weights() -> None:
    x, g = normal(5, 39, 64, dtype="bfloat16"), normal(6, 39, 32)
    dw = parts.weight_gradient(x, g, contract=PartsChunkContract(2), interpret=INTERPRET)
    exact = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    assert np.abs(dw - exact).max() < 39 * 2.0**-14
    transposed_w = parts.weight_gradient(g, x, contract=PartsChunkContract(2), interpret=INTERPRET)
    np.testing.assert_allclose(transposed_w.T, dw, rtol=0, atol=1e-4)  # the interpreter's sums have no fixed order


def test_numbers_that_are_not_finite_stay_in_their_rows() -> None:
    x, w = np.array(normal(7, 3, 64)), normal(8, 64, 16, dtype="bfloat16")
    clean = parts.matmul(jnp.asarray(x), w, contract=PartsContract(2), interpret=INTERPRET)
    x[0, 3], x[1, 5] = np.inf, np.nan
    y = np.asarray(parts.matmul(jnp.asarray(x), w, contract=PartsContract(2), interpret=INTERPRET))
    assert np.isinf(y[0]).all()
    assert np.isnan(y[1]).all()
    assert_bits_equal(y[2], clean[2])


def test_the_gradients_of_a_float32_result_use_them() -> None:
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((40, 256), (256, 512)))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return bijax.matmul(x, w, preferred_element_type="float32").sum()

    found = bijax.contracts(jax.grad(loss, (0, 1)), x, w, platform="cuda", architecture="sm_90").ids
    assert {PartsContract(2).id, PartsChunkContract(2).id} <= set(found)


def test_operands_of_one_dtype_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected one float32 and one bfloat16 operand, got float32"):
        parts.matmul(normal(0, 8, 64), normal(1, 64, 8), contract=PartsContract(2), interpret=INTERPRET)
    with pytest.raises(ValueError, match="parts must be 2 or 3, got 4"):
        PartsContract(4)
