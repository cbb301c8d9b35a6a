"""Quotients are rounded one by one, whatever stands around them: XLA makes x / (y * z) of x / y / z."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device

SHAPES: Final = ((7,), (8,), (1, 1, 1), (4, 16))
CHAINS: Final[dict[str, Callable[..., Any]]] = {
    "x / y / z": lambda np, x, y, z: x / y / z,
    "x / (y / z)": lambda np, x, y, z: x / (y / z),
    "(x / y) / (z / x)": lambda np, x, y, z: (x / y) / (z / x),
    "x / 3 / 5": lambda np, x, y, z: x / np.float32(3) / np.float32(5),
    "x / 4 - y / 2": lambda np, x, y, z: x / np.float32(4) - y / np.float32(2),
    "x / 2 / 3 / 8": lambda np, x, y, z: x / np.float32(2) / np.float32(3) / np.float32(8),
    "x * y / 2 + z": lambda np, x, y, z: x * y / np.float32(2) + z,
    "3 / x / 7": lambda np, x, y, z: np.float32(3) / x / np.float32(7),
    "x * y / y": lambda np, x, y, z: x * y / y,
    "x / y * y": lambda np, x, y, z: x / y * y,
    "1 / (1 / x)": lambda np, x, y, z: np.float32(1) / (np.float32(1) / x),
    "x / sqrt(y)": lambda np, x, y, z: x / np.sqrt(y),
    "sqrt(x) / sqrt(y) / z": lambda np, x, y, z: np.sqrt(x) / np.sqrt(y) / z,
}


def given(shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.abs(rng.standard_normal(shape)).astype(np.float32) + np.float32(0.01) for _ in range(3)]


def every_chain(numpy: Any, *arrays: Any) -> dict[str, Any]:
    return {name: chain(numpy, *arrays) for name, chain in CHAINS.items()}


@pytest.mark.tier("fault")
@pytest.mark.parametrize("shape", SHAPES)
def test_chains_have_the_bits_of_their_operations(shape: tuple[int, ...]) -> None:
    arrays = given(shape)
    expected = every_chain(np, *arrays)
    assert_bits_equal(jax.jit(bijax.invariant(lambda *arrays: every_chain(jnp, *arrays)))(*arrays), expected)


def test_plain_jax_joins_divisions() -> None:
    """The control."""
    x, y, z = given((64,))
    assert (np.asarray(jax.jit(lambda x, y, z: x / y / z)(x, y, z)) != x / y / z).any()


@pytest.mark.tier("fault")
@pytest.mark.parametrize("width", [1, 7])
def test_quotients_of_powers_of_two_are_not_contracted_with_sums(width: int) -> None:
    """They are products, exact but for subnormal results: these are zeros before the sum, and not inside of it."""
    draw = np.random.default_rng(0)
    x, y = (np.float32(draw.uniform(low, 1.9 * low, (33, width)) * 1.2e-38) for low in (1, 2))
    run = jax.jit(bijax.invariant(lambda x, y: (x / 4 + y, y - x / 2)))
    for size in (1, 2, 5, 33):
        for found in run(x[:size], y[:size]):
            assert_bits_equal(found, y[:size], err_msg=str(size))


@pytest.mark.tier("fault")
def test_gradients_of_small_factorisations_in_a_batch() -> None:
    """Two triangular systems of one unknown are two divisions. Whether they touch depends on the size of the batch."""

    def one(x: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(jnp.abs(x[:1]).reshape(1, 1) + 0.3).sum() * x[1]

    rows = on_device(np.random.default_rng(0).standard_normal((9, 2)), jnp.float32)
    gradients = jax.jit(bijax.invariant(jax.vmap(jax.grad(one))))
    expected = np.asarray(gradients(rows))
    alone = np.concatenate([np.asarray(gradients(rows[i : i + 1])) for i in range(len(rows))])
    assert_bits_equal(alone, expected)


def test_a_division_by_a_power_of_two_is_a_product_with_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 10.0 ** rng.integers(-38, 38, 500)).astype(np.float32)
    x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 2e-38, 3.4e38]
    for divisor in (2.0, -8.0, 2.0**-20, 2.0**63, 2.0**70, 3.0):
        constant = jax.jit(bijax.invariant(lambda x, divisor=divisor: x / divisor))
        given = jax.jit(bijax.invariant(jnp.divide))
        assert_bits_equal(constant(x), given(x, np.full_like(x, divisor)), err_msg=str(divisor))
        assert ("divide" in constant.lower(x).as_text()) == (divisor in (2.0**70, 3.0))
