"""assert_bits_equal: what it tells apart and what its message names."""

import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal


def failure(actual, expected, **kwargs):
    with pytest.raises(AssertionError) as caught:
        assert_bits_equal(actual, expected, **kwargs)
    return str(caught.value)


def test_equal_trees_pass():
    tree = {"a": [jnp.arange(3), np.float32(1.5)], "b": (None, jnp.zeros((0, 2), jnp.bfloat16)), "c": True}
    assert_bits_equal(tree, tree)
    assert_bits_equal(np.float32("nan"), jnp.float32(jnp.nan), nan_bits=True)
    assert_bits_equal([], [])


def test_message_names_everything():
    expected = jnp.ones((2, 3), jnp.float32)
    actual = expected.at[1, 0].set(np.nextafter(np.float32(1), np.float32(2))).at[1, 2].set(-1.0)
    assert failure({"y": [actual]}, {"y": [expected]}, err_msg="rms_norm, K=3").splitlines() == [
        "rms_norm, K=3",
        "bits differ at ['y'][0]: 2 of 6 elements of float32(2, 3)",
        "  first index (1, 0)",
        "    actual   1.0000001 0x3f800001",
        "    expected 1.0 0x3f800000",
        "    ULP distance 1",
        "  largest ULP distance 2130706432",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_nan_equals_any_nan_but_no_number(dtype):
    nan = np.array(np.nan, jnp.dtype(dtype))
    assert_bits_equal(-nan, nan)
    assert "bits differ" in failure(-nan, nan, nan_bits=True)
    assert "bits differ" in failure(nan, np.array(np.inf, nan.dtype))
    assert "bits differ" in failure(np.array(0, nan.dtype), nan)


def test_zero_signs_and_nans_are_told_apart():
    assert "0x00000000" in failure(np.float32(0.0), np.float32(-0.0))
    quiet = np.array([0x7FC00000, 0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001, 0xFFC00000, 0x3F800001], np.uint32).view(np.float32)
    assert "1 of 3 elements" in failure(quiet, other)
    message = failure(quiet, other, nan_bits=True)
    assert "3 of 3 elements" in message
    assert "actual   nan 0x7fc00000" in message
    assert "expected nan 0x7fc00001" in message
    assert "ULP distance none (nan)" in message
    assert "largest ULP distance 1; 2 elements differ by a nan" in message


def test_16_bit_and_integer_arrays():
    message = failure(jnp.array([1.0], jnp.bfloat16), jnp.array([1.0078125], jnp.bfloat16))
    assert "actual   1 0x3f80" in message
    assert "ULP distance 1" in message
    message = failure(np.array([1, -1], np.int16), np.array([1, 2], np.int16))
    assert "actual   -1 0xffff" in message
    assert "ULP distance none (int16)" in message


def test_shapes_dtypes_and_structures():
    assert failure({"w": jnp.zeros((2, 3))}, {"w": jnp.zeros((3, 2))}) == (
        "shapes differ at ['w']: actual float32(2, 3), expected float32(3, 2)"
    )
    assert failure(jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)) == (
        "dtypes differ at the array: actual float32(2,), expected bfloat16(2,)"
    )
    assert "only actual has a leaf at ['b']" in failure({"a": 1, "b": 2}, {"a": 1})
    assert "only expected has a leaf at [1]" in failure([1], [1, 2])
    assert "structures differ: actual" in failure([1, 2], (1, 2))
    assert "structures differ: actual" in failure([1, None], [1])


def test_unsupported_dtype():
    with pytest.raises(TypeError, match="complex64"):
        assert_bits_equal(jnp.zeros(2, jnp.complex64), jnp.zeros(2, jnp.complex64))
