"""Gradients of weights on Hopper, on a CPU: the kernel under Mosaic's interpreter, bad input."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract import ChunkContract, WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.launch import matmul, weight_gradient
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule
from tests.arrays import ones
from tests.mosaic import Races, interpreter

CONTRACT = WgmmaChunkContract()
SMALL = MatmulSchedule(False, 64, 64, 64, 3)

# (..., M, K) and (..., M, N), result, schedule.
INTERPRETED = {
    "whole tiles": ((128, 64), (128, 128), "float32", SMALL),
    "persistent": ((72, 192), (72, 96), "bfloat16", dataclasses.replace(SMALL, warpgroups=2, blocks=2, group=1)),
    "narrow": ((40, 48), (40, 32), "float32", MatmulSchedule(False, 64, 32, 128, 3)),
    "padded": ((77, 33), (77, 50), "float32", None),
    "in turn": ((2, 72, 192), (2, 72, 96), "float32", MatmulSchedule(False, 64, 64, 64, 3, 2, "tiles", blocks=2)),
    "stack": ((2, 24, 64), (2, 24, 80), "float32", SMALL),
    "one x": ((24, 64), (2, 24, 64), "float32", SMALL),
    "one g": ((2, 24, 64), (24, 64), "bfloat16", SMALL),
}


@pytest.mark.tier("full", fast=("padded-False", "one g-False"))
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_sums_outer_products(name: str, continued: bool, races: Races) -> None:
    x_shape, g_shape, out, schedule = INTERPRETED[name]
    rng = np.random.default_rng(len(name))
    x, g = integers(rng, x_shape), integers(rng, g_shape)
    expected = x.swapaxes(-1, -2) @ g
    total = integers(rng, expected.shape) if continued else np.float32(0)
    y = weight_gradient(
        jnp.asarray(x, "bfloat16"),
        jnp.asarray(g, "bfloat16"),
        contract=CONTRACT,
        accumulate=jnp.asarray(total) if continued else None,
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    # Sums of small integers are exact in every order; the order is compared on a GPU.
    np.testing.assert_array_equal(np.asarray(y), (expected + total).astype(jnp.dtype(out)))
    assert not races()


@pytest.mark.tier("full", fast=("True",))
@pytest.mark.parametrize("transpose_w", [False, True])
def test_rows_beside_a_stack_of_weights(transpose_w: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = integers(rng, (13, 64)), integers(rng, (3, 64, 32))
    stored = jnp.asarray(w.swapaxes(-1, -2) if transpose_w else w, "bfloat16")
    y = matmul(
        jnp.asarray(x, "bfloat16"),
        stored,
        contract=WgmmaContract(),
        transpose_w=transpose_w,
        out_dtype="float32",
        interpret=interpreter(),
    )
    np.testing.assert_array_equal(np.asarray(y), x @ w)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
def test_no_rows_leave_the_sum_as_it_is(m: int, k: int, n: int) -> None:
    x, g = jnp.ones((2, m, k), jnp.float16), jnp.ones((2, m, n), jnp.float16)
    assert not weight_gradient(x, g, contract=CONTRACT).any()
    total = jnp.full((2, k, n), -0.0)
    kept = weight_gradient(x, g, contract=CONTRACT, accumulate=total)
    assert kept.shape == (2, k, n)
    assert np.signbit(kept).all()


X, G = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((2, 16), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": ChunkContract()}, "expected a WgmmaChunkContract"),
        ({"g": ones((3, 16), jnp.bfloat16)}, "as many rows"),
        ({"x": ones((2, 2, 8), jnp.bfloat16), "g": ones((3, 2, 16), jnp.bfloat16)}, "equal leading dimensions"),
        ({"g": ones((2, 16), jnp.float16)}, "one dtype"),
        ({"x": ones((2, 8)), "g": ones((2, 16))}, "bfloat16 or float16"),
        ({"out_dtype": "float64"}, "expected out_dtype"),
        ({"accumulate": ones((8, 16), jnp.bfloat16)}, r"expected accumulate float32\[8, 16\], got bfloat16"),
        ({"accumulate": ones((16, 8))}, r"expected accumulate float32\[8, 16\]"),
        ({"schedule": dataclasses.replace(SMALL, stages=60)}, "shared memory"),
        ({"schedule": MatmulSchedule(True, 64, 64, 64, 3)}, "without swap"),
    ],
)
def test_unsupported_operands_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        weight_gradient(**{"x": X, "g": G, "contract": CONTRACT, **change})


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(np.float32)
