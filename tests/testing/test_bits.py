"""bits and ulp_distance against slow references over the formats themselves."""

import bisect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bijax.testing import NAN_DISTANCE, bits, ulp_distance

# NumPy warns about some of the bfloat16 nans that it converts here.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

FLOATS = ("float16", "bfloat16", "float32", "float64")
UNSIGNED = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def from_bits(pattern, dtype):
    return np.asarray(pattern, UNSIGNED[dtype]).view(np.dtype(dtype))


def patterns(dtype):
    return st.integers(0, 2 ** (8 * np.dtype(dtype).itemsize) - 1)


def all_values(dtype):
    """Every distinct number of a 16-bit format but nan, in ascending order; ±0 is one."""
    values = from_bits(np.arange(2**16), dtype).astype(np.float64)
    return sorted(set(values[~np.isnan(values)].tolist()))


def scalar_reference(a, b):
    """The distance between two scalars by Python integers alone."""
    width = 8 * a.dtype.itemsize
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[a.dtype.name]
    infinity = (1 << (width - 1)) - (1 << mantissa)
    ordered = []
    for value in (a, b):
        pattern = int(bits(value))
        magnitude = pattern & ((1 << (width - 1)) - 1)
        if magnitude > infinity:
            return 0 if int(bits(a)) == int(bits(b)) else int(NAN_DISTANCE)
        ordered.append(-magnitude if pattern >> (width - 1) else magnitude)
    return abs(ordered[0] - ordered[1])


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_agrees_with_a_scalar_reference_and_is_symmetric(dtype, data):
    drawn = data.draw(st.lists(st.tuples(patterns(dtype), patterns(dtype)), min_size=1, max_size=20))
    a, b = (from_bits([pair[i] for pair in drawn], dtype) for i in range(2))
    distance = ulp_distance(a, b)
    assert distance.dtype == np.uint64
    assert distance.tolist() == [scalar_reference(x, y) for x, y in zip(a, b, strict=True)]
    assert np.array_equal(distance, ulp_distance(b, a))
    assert not ulp_distance(a, a).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_nextafter_is_one_away(dtype, data):
    x = from_bits(data.draw(patterns(dtype)), dtype)
    if np.isfinite(x):
        for towards in (np.inf, -np.inf):
            assert ulp_distance(x, np.nextafter(x, np.asarray(towards, dtype))) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_neighbours_over_the_whole_16_bit_grid(dtype):
    values = np.array(all_values(dtype)).astype(np.dtype(dtype))
    assert (ulp_distance(values[1:], values[:-1]) == 1).all()
    # With the distance from the smallest value this fixes every distance between two numbers.
    assert np.array_equal(ulp_distance(values, np.full_like(values, values[0])), np.arange(len(values)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern_against_counting(dtype):
    values = all_values(dtype)
    every = from_bits(np.arange(2**16), dtype)
    for pivot in from_bits([0x0000, 0x8000, 0x0001, 0x3C00, 0x7BFF, 0xFBFF], dtype):
        at = bisect.bisect_left(values, float(pivot))
        expected = np.abs(np.searchsorted(values, every.astype(np.float64)) - at).astype(np.uint64)
        nan = np.isnan(every.astype(np.float64))
        assert np.array_equal(ulp_distance(every, np.full_like(every, pivot))[~nan], expected[~nan])
        assert (ulp_distance(every, np.full_like(every, pivot))[nan] == NAN_DISTANCE).all()


@pytest.mark.parametrize(
    ("dtype", "infinity"),
    [("float16", 0x7C00), ("bfloat16", 0x7F80), ("float32", 0x7F800000), ("float64", 0x7FF0000000000000)],
)
def test_opposite_extremes_do_not_overflow(dtype, infinity):
    highest = from_bits(infinity - 1, dtype)
    assert np.isfinite(highest.astype(np.float64))
    assert int(ulp_distance(highest, -highest)) == 2 * (infinity - 1)
    assert int(ulp_distance(from_bits(infinity, dtype), -from_bits(infinity, dtype))) == 2 * infinity
    assert ulp_distance(highest, from_bits(infinity, dtype)) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_and_nans(dtype):
    zero, one, infinity = (np.asarray(value, np.dtype(dtype)) for value in (0, 1, np.inf))
    nan, other_payload = (from_bits(int(bits(infinity)) + payload, dtype) for payload in (1, 2))
    negative = from_bits(int(bits(nan)) | 1 << (8 * nan.itemsize - 1), dtype)
    assert ulp_distance(zero, -zero) == 0
    assert bits(zero) != bits(-zero)
    smallest = from_bits(1, dtype)
    assert ulp_distance(smallest, -zero) == 1
    assert ulp_distance(smallest, -smallest) == 2
    assert ulp_distance(nan, nan) == 0
    for other in (zero, one, infinity, negative, other_payload):
        assert ulp_distance(nan, other) == NAN_DISTANCE
        assert ulp_distance(other, nan) == NAN_DISTANCE


def test_shapes_and_jax_arrays():
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    assert ulp_distance(x, x + 1).shape == (2, 3)
    assert ulp_distance(jnp.zeros((0, 3)), jnp.zeros((0, 3))).shape == (0, 3)
    assert isinstance(ulp_distance(jnp.float32(1), jnp.float32(1)), np.ndarray)
    assert bits(x.T).dtype == np.uint16
    assert bits(np.arange(6.0)[::2]).tolist() == np.array([0.0, 2.0, 4.0]).view(np.uint64).tolist()


@pytest.mark.parametrize(
    ("value", "unsigned"),
    [(np.bool_(True), np.uint8), (np.int8(-1), np.uint8), (np.int32(-1), np.uint32), (np.uint64(1), np.uint64)],
)
def test_bits_of_integers(value, unsigned):
    assert bits(value).dtype == unsigned


def test_wrong_input_is_refused():
    with pytest.raises(
        TypeError, match="one dtype among float16, bfloat16, float32, float64; got float32 and bfloat16"
    ):
        ulp_distance(jnp.float32(1), jnp.bfloat16(1))
    with pytest.raises(TypeError, match="got int32 and int32"):
        ulp_distance(jnp.int32(1), jnp.int32(1))
    with pytest.raises(ValueError, match=r"one shape; got \(3,\) and \(1,\)"):
        ulp_distance(jnp.zeros(3), jnp.zeros(1))
    with pytest.raises(TypeError, match=r"got complex64\. Take the real and imaginary parts"):
        bits(jnp.zeros(3, jnp.complex64))
    with pytest.raises(TypeError, match="got key<fry>"):
        bits(jax.random.key(0))
    with pytest.raises(TypeError, match="got <U1"):
        bits(np.array(["a"]))
