"""The row contract is what is computed: numpy gives the same bits."""

import jax
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal, hostile_rows
from tests.rows import row_emulation as emulation
from tests.rows.row_cases import all_ops

# Finite rows without denormals, which XLA flushes to zero and numpy does not.
KINDS = ("normal", "linspace", "wide", "cancelling")


@pytest.mark.tier("full", fast=("1023-float32",))
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [*((c, "float32") for c in (1, 77, 1023, 4200)), (200, "bfloat16"), (200, "float16")],
)
def test_numpy_gives_the_same_bits(columns: int, dtype: str) -> None:
    data = hostile_rows(0, (3, columns), dtype)
    x = np.concatenate([data[kind] for kind in KINDS])
    g = hostile_rows(1, x.shape, dtype)["normal"]
    w = np.random.default_rng(2).standard_normal(columns).astype(np.float32)
    found = jax.jit(all_ops)(x, g, w)
    with np.errstate(over="ignore"):
        expected = {
            "sum": emulation.add_row(x.astype(np.float32))[:, 0].astype(dtype),
            "mean": emulation.mean_row(x.astype(np.float32))[:, 0].astype(dtype),
            "rms_norm": emulation.rms_norm(x, w, 1e-6),
            "head_rms_norm": emulation.rms_norm(x, w + 1 + 1, 1e-6),
            "layer_norm": emulation.layer_norm(x, w, w, 1e-5),
            "var": emulation.variance(x)[:, 0],
        }
        gradients = {
            "softmax": emulation.softmax_gradient(np.asarray(found["softmax"][0]), g),
            "rms_norm": emulation.rms_norm_gradient(x, w, 1e-6, g),
            "layer_norm": emulation.layer_norm_gradient(x, w, 1e-5, g),
        }
    assert_bits_equal({name: found[name][0] for name in expected}, expected)
    assert_bits_equal({name: found[name][1] for name in gradients}, gradients)


def test_the_residual_is_rounded_before_the_norm() -> None:
    x, r = (hostile_rows(seed, (4, 300), "bfloat16")["normal"] for seed in (0, 1))
    w = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    y, h = bijax.rms_norm(x, w, residual=r)
    expected = (x.astype(np.float32) + r.astype(np.float32)).astype(x.dtype)
    assert_bits_equal(h, expected)
    assert_bits_equal(y, emulation.rms_norm(expected, w, 1e-6))
    assert_bits_equal(y, bijax.rms_norm(h, w))
