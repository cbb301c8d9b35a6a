"""Reshapes of sums and maxima: a barrier after each one on a CPU, and the bits that there are without it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal
from bijax.transform.hook import lowering


def normalized(x: jax.Array) -> jax.Array:
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (x.reshape(-1, 8, 5) * (weights / total**2 * 1.5).reshape(-1, 8, 5)).sum(axis=1) + 1


X = np.random.default_rng(0).standard_normal((9, 40)).astype(np.float32)


@pytest.mark.tier("full")
def test_the_bits_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    stock = lowering.with_settled_reshapes

    def counted(equations: Sequence[Any], old: Sequence[Any], plain: Any) -> list[Any]:
        found = stock(equations, old, plain)
        settled.append(sum(new is not e for new, e in zip(found, equations, strict=True)))
        return found

    def lowered() -> list[jax.Array]:
        both = jax.value_and_grad(lambda x: (normalized(x) ** 2).sum())
        return [jax.jit(bijax.invariant(normalized))(X), *jax.jit(bijax.invariant(both))(X)]

    monkeypatch.setattr(lowering, "with_settled_reshapes", counted)
    found = lowered()
    assert settled[0] == 2  # those of a sum and of a maximum, and no other reshape
    assert sum(settled) > 4
    jax.clear_caches()
    monkeypatch.setattr(lowering, "with_settled_reshapes", lambda equations, *_: list(equations))
    assert_bits_equal(lowered(), found)
    jax.clear_caches()


def test_rows_keep_their_bits() -> None:
    assert_batch_invariant(bijax.invariant(normalized), X, batch_sizes=(1, 3, 8), modes=("jit",))


def test_programs_that_are_not_invariant_are_left_alone() -> None:
    assert "optimization_barrier" not in jax.jit(normalized).lower(X).as_text()
