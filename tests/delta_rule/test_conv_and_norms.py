"""The causal convolution and the norms of linear attention: bits, numbers, gradients, errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.delta_rule.tokens import KINDS, tokens

CHANNELS, WIDTH, KEPT = 23, 4, 12  # vector code leaves a remainder
extend = jax.jit(bijax.causal_conv1d_extend, static_argnames="activation")


def sequences(length: int, dtype: str) -> np.ndarray:
    """Returns a sequence of each kind, (B, T, C)."""
    each = [tokens(kind, length, (1, 3, 8, 8), 1)["value"].reshape(length, -1)[:, :CHANNELS] for kind in KINDS]
    with np.errstate(over="ignore"):
        return np.stack(each).astype(jnp.dtype(dtype))


def weights(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    w = np.random.default_rng(2).standard_normal((CHANNELS, WIDTH + 1)).astype(jnp.dtype(dtype))
    return w[:, :WIDTH], w[:, WIDTH]


def convolved(x: Any, w: Any, bias: Any) -> np.ndarray:
    """In float64."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    padded = np.concatenate([np.zeros((len(x), WIDTH - 1, CHANNELS)), x], 1)
    y = sum(padded[:, j : j + x.shape[1]] * w[:, j] for j in range(WIDTH)) + np.asarray(bias, np.float64)
    return np.asarray(y / (1 + np.exp(-y)))


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_convolution_in_parts(dtype: str) -> None:
    length, (w, bias) = 33, weights(dtype)
    x = sequences(length, dtype)
    n = len(x)
    expected = np.asarray(jax.jit(lambda x: bijax.causal_conv1d(x, w, bias, activation="silu"))(x))
    size, start = 5, np.zeros(n, np.int32)
    state = jnp.full((n, KEPT, CHANNELS), jnp.nan, dtype)  # nothing before the first token is read
    rng = np.random.default_rng(3)
    while (start < length).any():
        lengths = np.minimum(rng.integers(0, size + 1, n), length - start).astype(np.int32)
        at = np.minimum(start[:, None] + np.arange(size), length - 1)
        # Tokens after the length are drafts of the step before that were wrong; they are written over.
        drafts = np.minimum(lengths + 2, np.minimum(size, length - start)).astype(np.int32)
        part = x[np.arange(n)[:, None], at]
        y, state = extend(part, w, bias, state=state, start=start, lengths=drafts, activation="silu")
        for i in range(n):
            assert_bits_equal(np.asarray(y)[i, : drafts[i]], expected[i, start[i] : start[i] + drafts[i]])
            assert not np.asarray(y)[i, drafts[i] :].any()
        start = start + lengths


def test_control_plain_convolution_differs() -> None:
    """As models are usually written: a convolution in prefill, a sum over the window in decoding."""
    x, (w, _) = sequences(33, "float32")[:1], weights("float32")

    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        padding = [(WIDTH - 1, 0)]
        kernel = jnp.asarray(w).T[:, None]
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), padding, dimension_numbers=numbers, feature_group_count=CHANNELS
        )

    @jax.jit
    def token(window: jax.Array) -> jax.Array:
        return jnp.einsum("bwc,cw->bc", window, w)

    padded = np.pad(x, [(0, 0), (WIDTH - 1, 0), (0, 0)])
    tokens = np.stack([token(padded[:, i : i + WIDTH]) for i in range(33)], 1)
    np.testing.assert_allclose(whole(x), tokens, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        assert_bits_equal(whole(x), tokens)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 4e-3), ("float16", 6e-4)])
def test_numbers(dtype: str, bound: float) -> None:
    x, (w, bias) = sequences(40, dtype)[:1], weights(dtype)
    gate = np.asarray(x[:, ::-1])

    def close(actual: Any, expected: Any) -> None:
        assert np.linalg.norm(np.asarray(actual, np.float64) - expected) < bound * np.linalg.norm(expected)

    close(bijax.causal_conv1d(x, w, bias, activation="silu"), convolved(x, w, bias))
    wide, opened = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    close(bijax.l2_norm(x), wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6))
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(w[:, 0], np.float64)
    close(bijax.gated_rms_norm(x, gate, w[:, 0]), normal * opened / (1 + np.exp(-opened)))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norms_keep_their_bits(dtype: str) -> None:
    x = sequences(33, dtype).reshape(-1, CHANNELS)
    gate, w = np.asarray(x[::-1]), weights(dtype)[0][:, 0]

    def norms(x: jax.Array, gate: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, gate: (bijax.gated_rms_norm(x, gate, w), bijax.l2_norm(x)), x, gate)
        return y, pull((gate, gate))

    whole = jax.tree.map(np.asarray, jax.jit(norms)(x, gate))
    for rows in (slice(0, 1), slice(5, 8), slice(100, 133)):
        part = jax.jit(norms)(x[rows], gate[rows])
        jax.tree.map(lambda a, b, rows=rows: assert_bits_equal(a, b[rows]), part, whole)


@pytest.mark.tier("full")
def test_gradients_against_differences() -> None:
    rng = np.random.default_rng(0)
    x, gate, w = rng.standard_normal((2, 9, CHANNELS)), rng.standard_normal((2, 9, CHANNELS)), weights("float32")[0]
    x, gate, w = (a.astype(np.float32) for a in (x, gate, w))

    def ours(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
        y = bijax.causal_conv1d(x, w, activation="silu")
        return (bijax.l2_norm(y) * gate + bijax.gated_rms_norm(y, gate, w[:, 0])).sum()

    def plain(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (WIDTH - 1, 0), (0, 0)])
        y = jax.nn.silu(sum(padded[:, j : j + 9] * w[:, j] for j in range(WIDTH)))
        length = y / jnp.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
        normal = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        return (length * gate + normal * w[:, 0] * jax.nn.silu(gate)).sum()

    found = jax.jit(jax.grad(ours, (0, 1, 2)))(x, gate, w)
    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(plain, (0, 1, 2)))(*(a.astype(np.float64) for a in (x, gate, w)))
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 2e-6 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x, w: bijax.causal_conv1d(x[0], w), ValueError, r"x must have the shape \(B, T, C\)"),
        (lambda x, w: bijax.causal_conv1d(x, w[:2]), ValueError, r"weight must have the shape \(C, W\) with C=3"),
        (lambda x, w: bijax.causal_conv1d(x, w[:, :0]), ValueError, "weight must have at least 1 column"),
        (lambda x, w: bijax.causal_conv1d(x, w, activation="relu"), ValueError, "must be 'silu' or None, got 'relu'"),
        (lambda x, w: bijax.causal_conv1d(x, w, before=x), ValueError, "before must have the shape"),
        (
            lambda x, w: bijax.causal_conv1d_extend(x, w, state=x[:, :1], start=[0, 0]),
            ValueError,
            "state must hold at least 2 tokens",
        ),
        (
            lambda x, w: bijax.causal_conv1d_extend(x, w, state=x.astype(jnp.bfloat16), start=[0, 0]),
            TypeError,
            "state must have the dtype of x",
        ),
        (lambda x, w: bijax.causal_conv1d_extend(x, w, state=x, start=[0, -1]), ValueError, r"start must be in \[0"),
        (lambda x, w: bijax.gated_rms_norm(x, x[0]), ValueError, "gate must have the shape of x"),
        (lambda x, w: bijax.gated_rms_norm(x, x, w), ValueError, "weight must have the shape"),
        (lambda x, w: bijax.l2_norm(jnp.float32(1)), ValueError, "at least 1 dimension"),
        (lambda x, w: bijax.l2_norm(x, eps=-1.0), ValueError, "eps"),
    ],
)
def test_errors(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(jnp.ones((2, 4, 3)), jnp.ones((3, 3)))


def in_slots(x: Any, state: Any, at: Any, start: Any, lengths: Any) -> Any:
    w, bias = weights("float32")
    places = {"start": start, "lengths": lengths, "slots": at}
    return bijax.causal_conv1d_extend(x, w, bias, state=state, activation="silu", **places)


def test_convolution_in_slots() -> None:
    """Sequences in slots have the bits of sequences by themselves; the other slots are left alone."""
    x, (w, bias) = sequences(6, "float32"), weights("float32")
    n, slots = len(x), np.random.default_rng(0).permutation(20)[: len(x)].astype(np.int32)
    kept, alone = jnp.full((20, KEPT, CHANNELS), jnp.nan), jnp.zeros((n, KEPT, CHANNELS))
    run = jax.jit(in_slots)
    for t in range(0, 6, 2):
        start, lengths = np.full(n, t, np.int32), np.where(np.arange(n) == 3, 0, 2).astype(np.int32)
        at = np.where(lengths > 0, slots, 20 + t).astype(np.int32)  # out of range: padding
        y, kept = run(x[:, t : t + 2], kept, at, start, lengths)
        expected, alone = extend(x[:, t : t + 2], w, bias, state=alone, start=start, lengths=lengths, activation="silu")
        assert_bits_equal(np.delete(np.asarray(y), 3, 0), np.delete(np.asarray(expected), 3, 0))
    used = np.delete(slots, 3)
    assert_bits_equal(np.asarray(kept)[used, :6], np.delete(np.asarray(alone), 3, 0)[:, :6])
    assert np.isnan(np.delete(np.asarray(kept), used, 0)).all()


def test_a_donated_state_is_not_copied() -> None:
    """XLA copies an array that is read and written in no order; the control reads it once more at the end."""
    x, number = jax.ShapeDtypeStruct((2, 1, CHANNELS), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    state = jax.ShapeDtypeStruct((64, KEPT, CHANNELS), jnp.float32)

    def control(x: Any, state: Any, *places: Any) -> Any:
        y, new = in_slots(x, state, *places)
        return y + state[63, 0], new

    def copies(function: Any) -> int:
        program = jax.jit(function, donate_argnums=1).lower(x, state, number, number, number).compile()
        return len(re.findall(rf"f32\[64,{KEPT},{CHANNELS}\]\S* copy\(", program.as_text()))

    assert copies(in_slots) == 0
    assert copies(control) > 0
