"""Kernels in a loop over rows that XLA:CPU compiles to one function, where barriers do not separate them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal

_rng = np.random.default_rng(0)
X, Y = (2 * _rng.standard_normal((48, 6)).astype(np.float32) for _ in range(2))
W = _rng.standard_normal(6).astype(np.float32)
LABELS = np.arange(48, dtype=np.int32)[:, None] % 6


def loss_of_norms(x: jax.Array, y: jax.Array) -> jax.Array:
    normed, total = bijax.rms_norm(x, W, residual=y)
    return (normed * jnp.sin(jnp.arange(6)) + jnp.cos(total)).sum()


CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "cross entropy": (lambda x, y: bijax.softmax_cross_entropy(x, y[:, 0], z_loss=0.1), (X, LABELS)),
    "layer norm": (lambda x: bijax.layer_norm(x, W, W), (X,)),
    "gradient": (bijax.invariant(jax.grad(loss_of_norms)), (X, Y)),
    "product and sum": (bijax.invariant(lambda x, y: bijax.rms_norm(x, W) + y), (X, Y)),
    "product of a row and sum": (bijax.invariant(lambda x, y: x.prod(-1, keepdims=True) + y), (X[:, :2], Y[:, :1])),
    "product of prefixes and sum": (bijax.invariant(lambda x, y: jnp.cumprod(x, -1) + y), (X[:, :2], Y[:, :2])),
    "scattered product and sum": (
        bijax.invariant(lambda x, y: x.at[..., -1].multiply(y[..., 0]) + y),
        (X[:, :1], Y[:, :1]),
    ),
    "scattered number and sum": (bijax.invariant(lambda x, y: x.at[..., -1].multiply(W[0]) + y), (X[:, :1], Y[:, :1])),
    "softmax and sum": (bijax.invariant(lambda x, y: bijax.softmax(x) + y), (X, Y)),
}


def in_both(f: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the results of all rows at once, and of each in a loop."""
    looped = jax.jit(lambda *xs: jax.lax.map(lambda row: f(*row)[0], tuple(x[:, None] for x in xs)))
    return jax.jit(f)(*arrays), looped(*arrays)


@pytest.mark.parametrize("name", CASES)
def test_a_row_in_a_loop(name: str) -> None:
    assert_bits_equal(*in_both(*CASES[name]))


@pytest.mark.parametrize("name", ["product of a row and sum", "scattered product and sum", "scattered number and sum"])
def test_a_row_in_a_loop_in_float64(name: str) -> None:
    f, arrays = CASES[name]
    with jax.enable_x64(True):
        assert_bits_equal(*in_both(f, tuple(x.astype(np.float64) / 3 for x in arrays)))


def test_a_row_alone_in_a_scan() -> None:
    """The loop around one row is small enough, that around all rows is not."""
    run = jax.jit(lambda x, y: jax.lax.scan(lambda c, _: (bijax.rms_norm(c, W) + y, None), x, None, length=3)[0])
    assert_bits_equal(run(X, Y)[5:6], run(X[5:6], Y[5:6]))


def test_plain_operations_differ() -> None:
    together, looped = in_both(jax.nn.softmax, (_rng.standard_normal((48, 300)).astype(np.float32),))
    assert (np.asarray(together) != np.asarray(looped)).any()
