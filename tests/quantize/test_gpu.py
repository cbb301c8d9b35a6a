"""Quantised and picked rows on a Hopper GPU: the bits of the CPU's portable form, in any batch."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal
from tests.quantize.cases import Case, cases

pytestmark = pytest.mark.gpu

THREADS = 14  # kernels compile outside of the interpreter lock

# Lanes of one number and of vectors, rows of whole blocks and others, held in registers and not, in clusters too.
SHAPES = (
    (5, 576, "bfloat16", "float32"),
    (300, 768, "float16", "bfloat16"),
    (200, 1024, "bfloat16", "float32"),
    (300, 7168, "bfloat16", "float32"),
    (130, 4096, "float32", "float32"),
    (4, 32000, "bfloat16", "float32"),
)
KINDS = ("normal", "cancelling")


@pytest.mark.parametrize(("m", "columns", "dtype", "smooth"), SHAPES)
def test_the_bits_are_those_of_the_cpu(m: int, columns: int, dtype: str, smooth: str) -> None:
    def run(case: Case) -> tuple[Any, Any]:
        arguments = [jnp.asarray(a) for a in case.arguments]
        found = jax.jit(lambda *a: case.kernel(*a, **case.parameters))(*arguments)
        with jax.default_device(jax.devices("cpu")[0]):
            there = [jnp.asarray(a) for a in case.arguments]
            expected = jax.jit(lambda *a: case.portable(*a, **case.parameters))(*there)
        return jax.device_get(found), jax.device_get(expected)

    every = [case for kind in KINDS for case in cases(m, columns, dtype, smooth, kind)]
    with ThreadPoolExecutor(THREADS) as pool:
        for case, (found, expected) in zip(every, pool.map(run, every), strict=True):
            assert_bits_equal(found, expected, err_msg=case.name)


def test_a_scale_that_is_almost_subnormal() -> None:
    # Where a GPU computes with subnormal numbers and a CPU does not, the oracle is NumPy.
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 1024)) * 2.0 ** rng.integers(-140, -90, (64, 1))).astype(np.float32)
    y, scale = jax.jit(bijax.scale_dynamic_quant)(x)
    expected = np.maximum(np.abs(x).max(1) / np.float32(127), np.finfo(np.float32).tiny)
    assert_bits_equal((y, scale), (np.rint(x / expected[:, None]).astype(np.int8), expected))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_row_alone_and_in_batches(dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), (140, 2048), "bfloat16")
    smooth, sizes = jnp.exp(jax.random.normal(jax.random.key(1), (2048,))), (1, 8, 140)

    def call(x: Any) -> Any:
        return bijax.scale_dynamic_quant(x, smooth, dtype=dtype), bijax.add_rms_norm_dynamic_quant(
            x, smooth, smooth, residual=x, dtype=dtype
        )

    assert_batch_invariant(call, x, batch_sizes=sizes, neighbours=("given", "nan"), modes=("jit",))


def test_swiglu_of_experts_is_near_the_exact_one_and_the_same_in_any_batch() -> None:
    x = jax.random.normal(jax.random.key(0), (300, 1536), "bfloat16")
    counts = jnp.array([100, 0, 150], jnp.int32)
    y, scale = jax.jit(bijax.moe_swiglu_dynamic_quant, static_argnums=1)(x, None, counts)
    gate, up = np.split(np.asarray(x).astype(np.float64), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    found = np.asarray(y).astype(np.float64) * np.asarray(scale)[:, None]
    assert np.abs(found[:250] - exact[:250]).max() <= 0.51 * np.asarray(scale).max()
    assert not np.asarray(y)[250:].any()
    assert not np.asarray(scale)[250:].any()
    for i in (0, 17, 249):
        alone = bijax.moe_swiglu_dynamic_quant(x[i : i + 1], None, [1])
        assert_bits_equal(alone, (y[i : i + 1], scale[i : i + 1]))


def test_rows_of_experts_are_copied_bit_by_bit() -> None:
    x = jax.random.bits(jax.random.key(0), (40, 512), "uint16").view(jnp.bfloat16)  # every kind of nan
    experts = jax.random.randint(jax.random.key(1), (40, 3), 0, 9)
    rows, _, offset = jax.jit(lambda x, e: bijax.moe_scatter(x, e, expert_end_idx=6, allocated_tokens=120))(x, experts)
    picked, at = np.asarray(rows).view(np.uint16), np.asarray(offset)
    expected = np.where((at >= 0)[:, None], np.asarray(x).view(np.uint16)[at // 3], 0)
    assert_bits_equal(picked, expected)
