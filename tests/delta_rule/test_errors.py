"""Bad input of the gated delta rule: the type of the error, and what it says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax import DeltaRuleState
from pallas_kernels.delta_rule.slots import packed
from tests.arrays import zeros

X = {
    "query": np.ones((2, 3, 2, 8), np.float32),
    "key": np.ones((2, 3, 2, 8), np.float32),
    "value": np.ones((2, 3, 4, 6), np.float32),
    "g": np.zeros((2, 3, 4), np.float32),
    "beta": np.ones((2, 3, 4), np.float32),
}
STATE = DeltaRuleState.zeros(2, key_heads=2, value_heads=4, key_size=8, value_size=6)
SLOTS = dataclasses.replace(STATE, inverse=packed(STATE.inverse))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"value": np.ones((2, 3, 5, 6), np.float32), "g": X["g"][..., :1].repeat(5, 2)}, ValueError, "beta must have"),
        ({"query": X["query"].astype(np.int32)}, TypeError, "query must have one of the dtypes"),
        ({"key": X["key"].astype(jnp.bfloat16)}, TypeError, "share one dtype"),
        ({"key": X["key"][:, :2]}, ValueError, r"key must have the shape \(B, T, J, D\) with B=2, T=3"),
        ({"g": X["g"][..., 0]}, ValueError, "g must have the shape"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"lengths": [1, 4]}, ValueError, r"lengths must be in \[0, 3\]"),
        ({"lengths": [1, -1]}, ValueError, r"lengths must be in \[0, 3\]"),
        ({"lengths": [1.0, 2.0]}, TypeError, "lengths must hold integers"),
        ({"initial_state": np.zeros((2, 4, 6, 8), np.float32)}, ValueError, "initial_state must have the shape"),
        ({"initial_state": zeros((2, 4, 8, 6), jnp.bfloat16)}, TypeError, "initial_state must be float32"),
        ({"cu_seq_lengths": [0, 3, 6]}, ValueError, r"query must have the shape \(T, J, D\)"),
    ],
)
def test_whole_sequences(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        bijax.gated_delta_rule(**{**X, **change})


def test_heads_that_do_not_divide() -> None:
    five = {"value": np.ones((2, 3, 5, 6), np.float32), "g": np.zeros((2, 3, 5)), "beta": np.zeros((2, 3, 5))}
    five = {name: a.astype(np.float32) for name, a in five.items()}
    with pytest.raises(ValueError, match="got 5 value heads and 2 key heads"):
        bijax.gated_delta_rule(**{**X, **five})
    with pytest.raises(ValueError, match="got 5 value heads and 2 key heads"):
        DeltaRuleState.zeros(1, key_heads=2, value_heads=5, key_size=8, value_size=6)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"state": X["g"]}, TypeError, "state must be a bijax.DeltaRuleState"),
        (
            {"state": DeltaRuleState.zeros(2, key_heads=2, value_heads=4, key_size=8, value_size=7)},
            ValueError,
            "state.state must have the shape",
        ),
        (
            {"state": DeltaRuleState.zeros(2, key_heads=2, value_heads=4, key_size=8, value_size=6, dtype="bfloat16")},
            TypeError,
            "state.key must be float32",
        ),
        ({"start": [0, 1]}, ValueError, r"start must be in .* \[0, 0\] for sequence 1, got 1"),
        ({"start": [-1, 0]}, ValueError, "for sequence 0, got -1"),
        ({"start": [0.0, 0.0]}, TypeError, "start must hold integers"),
        ({"lengths": [4, 0]}, ValueError, r"lengths must be in \[0, 3\]"),
        ({"slots": [0, 1]}, ValueError, r"state.inverse must have the shape \(S, H, 32, 65\)"),
        ({"slots": [0], "state": SLOTS}, ValueError, r"slots must have the shape \(B,\)"),
        ({"slots": [0.0, 1.0], "state": SLOTS}, TypeError, "slots must hold integers"),
    ],
)
def test_continuation(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        bijax.gated_delta_rule_extend(**{**X, "state": STATE, **change})


def test_snapshots() -> None:
    with pytest.raises(ValueError, match=r"edge must hold multiples of 64, at least 0, got \[64, 65\]"):
        DeltaRuleState.at_edge(STATE.state, [64, 65], key_heads=2)
    with pytest.raises(TypeError, match="must not be rounded"):
        DeltaRuleState.at_edge(STATE.state.astype(jnp.bfloat16), [0, 64], key_heads=2)
    with pytest.raises(ValueError, match="key_size must be at least 0, got -1"):
        DeltaRuleState.zeros(1, key_heads=1, value_heads=1, key_size=-1, value_size=1)


def test_no_gradient_of_a_continuation() -> None:
    def loss(value: jax.Array) -> jax.Array:
        return bijax.gated_delta_rule_extend(**{**X, "value": value}, state=STATE)[0].sum()

    with pytest.raises(bijax.UnsupportedError, match="gated_delta_rule_extend has no gradient"):
        jax.make_jaxpr(jax.grad(loss))(X["value"])


@pytest.mark.tier("full")
def test_traced_numbers_out_of_range_give_nan() -> None:
    y, state = jax.jit(bijax.gated_delta_rule)(**X, lengths=jnp.array([3, 4]))
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    assert np.isnan(state[1]).all()
    y, after = jax.jit(bijax.gated_delta_rule_extend)(**X, state=STATE, start=jnp.array([0, 5]))
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    assert after.length.tolist() == [3, 0]


@pytest.mark.tier("full")
def test_no_tokens() -> None:
    none = {name: a[:, :0] for name, a in X.items()}
    start = np.full((2, 4, 8, 6), 2, np.float32)
    y, state = bijax.gated_delta_rule(**none, initial_state=start)
    assert y.shape == (2, 0, 4, 6)
    assert (np.asarray(state) == 2).all()
    y, kept = bijax.gated_delta_rule_extend(**none, state=STATE)
    assert y.shape == (2, 0, 4, 6)
    assert kept.length.tolist() == [0, 0]
