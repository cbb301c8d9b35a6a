"""Kernels that quantise and pick rows, under Mosaic's interpreter: the bits of the portable forms."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import PTX_FUNCTIONS, QuantizeContract
from pallas_kernels.parts.xla.narrow import round_quotient
from pallas_kernels.quantize import hopper, portable
from tests.quantize.cases import Case, cases


@pytest.mark.usefixtures("hopper")
@pytest.mark.tier("full")
@pytest.mark.parametrize("case", [*cases(4, 272, "bfloat16"), *cases(4, 1056, "float32")], ids=lambda c: c.name)
def test_the_bits_are_those_of_the_portable_form(case: Case) -> None:
    found = case.kernel(*case.arguments, **case.parameters, interpret=plgpu.InterpretGPUParams())
    assert_bits_equal(found, case.portable(*case.arguments, **case.parameters), err_msg=case.name)


@pytest.mark.usefixtures("hopper")
def test_swiglu_of_experts() -> None:
    # The interpreter computes silu as the portable form does.
    x = np.random.default_rng(0).standard_normal((4, 528)).astype(np.float32)
    smooth = np.exp(x[:3, :264])
    expert = np.array([[2], [-1], [0], [1]], np.int32)
    of = {"contract": QuantizeContract()}
    options: dict[str, Any] = {"functions": PTX_FUNCTIONS, "interpret": plgpu.InterpretGPUParams()}
    found = hopper.quantize_swiglu(x, smooth, None, expert, **of, **options)
    assert_bits_equal(found, portable.quantize_swiglu(x, smooth, None, expert, **of))


def test_rounding_to_float8_is_to_nearest_even() -> None:
    # All numbers of the format, the middles between them, and their neighbours.
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    at = np.concatenate([numbers, middles])
    at = np.concatenate([at, np.nextafter(at, np.float32(9e9)), np.nextafter(at, np.float32(-9e9))])
    at = at[(np.abs(at) <= 448) & ((at == 0) | (np.abs(at) >= 2.0**-126))]
    x = jnp.asarray(at.astype(np.float32))
    found = jax.jit(lambda x: round_quotient(x, jnp.ones_like(x), QuantizeContract("float8_e4m3fn")))(x)
    assert_bits_equal(found, (np.asarray(x) + np.float32(0)).astype(ml_dtypes.float8_e4m3fn))  # -0 becomes 0


def test_a_product_corrected_twice_is_the_rounded_quotient() -> None:
    """What the kernel computes instead of a division, with exact fractions, where quotients are near a middle."""
    rng = np.random.default_rng(0)

    def rounded(x: Fraction) -> np.float32:
        # Twice rounded, but of fractions that far from a middle of float32: the middle itself is caught below.
        return np.float32(float(x))

    def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))

    for _ in range(2000):
        scale = np.float32(rng.uniform(1, 2) * 2.0 ** rng.integers(-60, 100))
        number = rng.integers(0, 127) + np.float32(0.5)
        number = np.nextafter(np.float32(number), np.float32(rng.choice([0, 999])))
        h = np.float32(number * scale) if rng.random() < 0.7 else np.float32(rng.uniform(0, 127) * scale)
        reciprocal = np.float32(1) / scale
        q = h * reciprocal
        for _ in range(2):
            q = fused(fused(-q, scale, h), reciprocal, q)
        assert q == h / scale
