"""hostile_rows: each kind of data is what it says."""

import fractions

import numpy as np
import pytest

from bijax.testing import assert_bits_equal, hostile_rows
from bijax.testing._data import NEIGHBOUR_KINDS, neighbour_rows

FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 8), (5,), (3, 0), (0, 4), (1, 1)])
def test_shape_dtype_and_repeatability(dtype, shape):
    data = hostile_rows(3, shape, dtype)
    assert all(x.shape == shape and x.dtype == np.dtype(dtype) for x in data.values())
    assert_bits_equal(hostile_rows(3, shape, dtype), data)


@pytest.mark.parametrize("dtype", FLOATS)
def test_kinds(dtype):
    raw = hostile_rows(0, (8, 64), dtype)
    data = {name: x.astype(np.float64) for name, x in raw.items()}
    smallest_normal = 2.0 ** {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
    assert np.isfinite(data["wide"]).all()
    assert np.ptp(np.log2(np.abs(data["wide"]))) > (6 if dtype == "float16" else 60)
    assert (data["denormal"] != 0).all()
    assert (np.abs(data["denormal"]) < smallest_normal).all()
    assert np.isfinite(data["huge"]).all()
    with np.errstate(over="ignore"):
        assert not np.isfinite((raw["huge"] * raw["huge"]).astype(np.float64)).any()
    assert (data["zeros"] == 0).all()
    for name in ("normal", "wide", "denormal", "huge", "zeros"):
        assert 0 < np.signbit(data[name]).mean() < 1, name
    assert data["linspace"].min() == -100
    assert data["linspace"].max() == 100


@pytest.mark.parametrize(("name", "special"), [("inf", np.isinf), ("nan", np.isnan)])
def test_special_rows_stand_beside_finite_ones(name, special):
    counts = special(hostile_rows(0, (9, 5), "float32")[name]).sum(axis=1)
    assert counts.tolist() == [5, 0, 1, 0, 5, 0, 1, 0, 5]


@pytest.mark.parametrize("columns", [16, 17])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cancelling_rows_sum_to_exactly_zero(dtype, columns):
    rows = hostile_rows(1, (6, columns), dtype)["cancelling"].astype(np.float64)
    assert all(sum(map(fractions.Fraction, row)) == 0 for row in rows)


def test_cancelling_rows_leave_only_rounding_in_a_sum():
    rows = hostile_rows(1, (64, 256), "float32")["cancelling"]
    upwards, downwards = (np.add.accumulate(x, axis=1)[:, -1] for x in (rows, rows[:, ::-1]))
    assert (upwards != downwards).any()


@pytest.mark.parametrize("kind", NEIGHBOUR_KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_hostile_in_every_element(kind, dtype):
    x = neighbour_rows(kind, np.random.default_rng(0), (4, 16), np.dtype(dtype)).astype(np.float64)
    property_of = {"nan": np.isnan, "inf": np.isinf, "zeros": lambda v: v == 0}.get(kind, np.isfinite)
    assert property_of(x).all()


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match="float64; got int32"):
        hostile_rows(0, (2, 2), "int32")
    with pytest.raises(ValueError, match=r"at least one axis \(a row\); got \(\)"):
        hostile_rows(0, (), "float32")
