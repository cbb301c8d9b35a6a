"""Products of float8 numbers: the numbers of the oracle where its sums are exact, and the same bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal
from pallas_kernels.contract import Float8Contract
from pallas_kernels.matmul.hopper.int8 import quant_matmul
from tests.operators import oracles
from tests.tiers import full_only

DTYPE = jnp.float8_e4m3fn


def small(seed: int, *shape: int) -> np.ndarray:
    """Integers of which every sum is exact in float32."""
    return np.random.default_rng(seed).integers(-8, 9, shape)


def test_sums_that_are_exact() -> None:
    x, w = small(0, 9, 300), small(1, 300, 40)
    row, column, bias = (np.random.default_rng(2).random(n).astype(np.float32) for n in (9, 40, 40))
    found = bijax.quant_matmul(jnp.asarray(x, DTYPE), jnp.asarray(w, DTYPE), row, column, bias=bias)
    assert_bits_equal(found, oracles.quantized_product(x, w, row, column, bias))
    turned = bijax.quant_matmul(
        jnp.asarray(x, DTYPE), jnp.asarray(w.T, DTYPE), row, column, bias=bias, transpose_b=True
    )
    assert_bits_equal(turned, found)


@pytest.mark.tier("full")
def test_experts_and_rows_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (21, 260), "bfloat16")
    w = jax.random.normal(jax.random.key(1), (3, 260, 24), "float32")
    rows, row = bijax.scale_dynamic_quant(x, dtype=DTYPE)
    experts, column = bijax.scale_dynamic_quant(w.swapaxes(1, 2), dtype=DTYPE)
    experts = experts.swapaxes(1, 2)
    options = {"preferred_element_type": jnp.float32}
    y = bijax.moe_quant_group_gemm(rows, row, experts, column, jnp.array([5, 0, 14]), **options)
    exact = np.asarray(rows, np.float64)[:5] @ np.asarray(experts, np.float64)[0] * np.asarray(row)[:5, None]
    np.testing.assert_allclose(np.asarray(y)[:5], exact * np.asarray(column)[0], rtol=2e-6, atol=1e-5)
    for i, expert in ((0, 0), (7, 2)):
        alone = bijax.moe_quant_matmul(rows[i : i + 1], row[i : i + 1], experts[expert], column[expert], **options)
        assert_bits_equal(alone, y[i : i + 1])
    assert not np.asarray(y)[19:].any()


def test_a_row_does_not_know_its_batch() -> None:
    x = jax.random.normal(jax.random.key(0), (33, 384), "float32")
    w, column = bijax.scale_dynamic_quant(jax.random.normal(jax.random.key(1), (64, 384)), dtype=DTYPE)

    def call(x: jax.Array) -> jax.Array:
        rows, row = bijax.scale_dynamic_quant(x, dtype=DTYPE)
        return bijax.quant_matmul(rows, w, row, column, transpose_b=True)

    assert_batch_invariant(call, x, batch_sizes=(1, 17), neighbours=("given", "nan"), modes=("jit",))


def test_dtypes_that_differ_are_an_error() -> None:
    x = jnp.ones((2, 4), DTYPE)
    with pytest.raises(TypeError, match="must share one dtype"):
        bijax.quant_matmul(x, jnp.ones((4, 3), jnp.int8), jnp.ones(2), jnp.ones(3))
    with pytest.raises(TypeError, match="int8 or float8_e4m3fn, got float32"):
        bijax.scale_dynamic_quant(jnp.ones((2, 4)), dtype=jnp.float32)


@pytest.mark.tier("full")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("groups", [full_only(None), 3])
def test_the_kernel_for_hopper_under_the_interpreter(groups: int | None) -> None:
    lead = () if groups is None else (groups,)
    x, w = small(0, 9, 272), small(1, *lead, 64, 272)
    row, column = (np.random.default_rng(2).random(shape).astype(np.float32) for shape in ((9,), (*lead, 64)))
    sizes = None if groups is None else jnp.array([4, 0, 5], jnp.int32)
    found = quant_matmul(
        jnp.asarray(x, DTYPE),
        jnp.asarray(w, DTYPE),
        jnp.asarray(row),
        jnp.asarray(column),
        contract=Float8Contract("wgmma32"),
        transpose_w=True,
        sizes=sizes,
        interpret=plgpu.InterpretGPUParams(),
    )
    of = (
        [(slice(0, 9), w, column)]
        if groups is None
        else [(slice(0, 4), w[0], column[0]), (slice(4, 9), w[2], column[2])]
    )
    expected = [oracles.quantized_product(x[rows], one.T, row[rows], scale) for rows, one, scale in of]
    assert_bits_equal(found, np.concatenate(expected))
