"""The gated delta rule against the recurrence in float64, and its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.delta_rule.plain import recurrent
from tests.delta_rule.tokens import batch, recurrence

NAMES = ("query", "key", "value", "g", "beta", "state")


def error(actual: Any, expected: Any) -> float:
    difference = np.asarray(jnp.asarray(actual, "float32"), np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


# Rounding the exact result to bfloat16 alone has an error of 1.66e-3; the usual chunked form has 3.54e-3.
@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("dtype", "kind", "bound"),
    [
        ("bfloat16", "normal", 3.54e-3),
        ("bfloat16", "lasting", 3.9e-3),
        ("bfloat16", "repeated", 6e-3),
        ("float16", "normal", 5e-4),
        ("float32", "normal", 2e-6),
        ("float32", "repeated", 1e-6),
    ],
)
def test_error_against_float64(dtype: str, kind: str, bound: float) -> None:
    x = batch([kind], 320, dtype, (1, 2, 128, 128))
    start = np.random.default_rng(3).standard_normal((1, 2, 128, 128)).astype(np.float32) * 0.1
    for state in (np.zeros_like(start), start):
        y, last = jax.jit(bijax.gated_delta_rule)(**x, initial_state=state)
        expected, expected_last = recurrence(x, state)
        assert error(y, expected) < bound
        assert error(last, expected_last) < bound


@pytest.mark.tier("full")
def test_gradients_against_float64() -> None:
    rng = np.random.default_rng(0)
    x = batch(["normal", "zeros"], 100, "float32")
    state = rng.standard_normal((2, 4, 16, 8)).astype(np.float32)
    cotangents = rng.standard_normal(x["value"].shape), rng.standard_normal(state.shape)
    arrays = (*x.values(), state, *(c.astype(np.float32) for c in cotangents))

    def gradients(function: Any) -> Any:
        return jax.jit(lambda *a: jax.vjp(function, *a[:6])[1](a[6:]))

    def ours(*a: jax.Array) -> Any:
        return bijax.gated_delta_rule(*a[:5], initial_state=a[5])

    found = gradients(ours)(*arrays)
    with jax.enable_x64(True):
        expected = gradients(recurrent)(*(np.asarray(a, np.float64) for a in arrays))
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert error(a, b) < 1e-6, name
    # A sequence alone has the bits that it has in the batch, and padding changes nothing.
    alone = gradients(ours)(*(a[1:] for a in arrays))
    for a, b in zip(found, alone, strict=True):
        assert_bits_equal(np.asarray(a)[1:], b)
    longer = [np.concatenate([a, a[:, :40]], 1) if a.ndim != 4 or a.shape[1] == 100 else a for a in arrays[:5]]
    more = np.concatenate([arrays[6], np.ones_like(arrays[6][:, :40])], 1)

    def cut(*a: jax.Array) -> Any:
        return bijax.gated_delta_rule(*a[:5], initial_state=a[5], lengths=np.full(2, 100))

    for a, b in zip(gradients(cut)(*longer, state, more, arrays[7]), found, strict=True):
        assert_bits_equal(np.asarray(a)[:, : b.shape[1]], b)
        assert not np.asarray(a)[:, b.shape[1] :].any()


@pytest.mark.tier("full")
def test_vmap_and_lowered_forms() -> None:
    x = batch(["normal", "ramp"], 20, "bfloat16")
    expected, last = jax.jit(bijax.gated_delta_rule)(**x)
    y, state = jax.jit(jax.vmap(lambda x: bijax.gated_delta_rule(**{n: a[None] for n, a in x.items()})))(x)
    assert_bits_equal(np.asarray(y)[:, 0], expected)
    assert_bits_equal(np.asarray(state)[:, 0], last)
    with bijax.lowering_for("sm_90"):
        jax.jit(bijax.gated_delta_rule).trace(**x).lower(lowering_platforms=("cuda",))
