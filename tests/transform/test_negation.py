"""Negative subnormal numbers of bfloat16 have the bits of a row alone in a batch, and a control without the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import bits
from bijax.transform.rules import registry

X = jax.random.normal(jax.random.key(0), (33, 37), jnp.bfloat16)
SMALLEST = jnp.asarray(9.18e-41, jnp.bfloat16)


def chosen(x: jax.Array) -> jax.Array:
    """The end of `jnp.spacing`."""
    return jnp.where(x > 0, -SMALLEST, SMALLEST)


def different() -> int:
    run = jax.jit(bijax.invariant(jax.vmap(lambda x: chosen(x))))
    return int((bits(run(X))[:1] != bits(run(X[:1]))).sum())


def test_negated_constants() -> None:
    assert different() == 0
    found = jax.jit(bijax.invariant(chosen))(X)
    np.testing.assert_array_equal(bits(found), np.where(np.asarray(X) > 0, 0x8001, 1))


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM's own negation, on processors that convert vectors to bfloat16 in one instruction."""
    with open("/proc/cpuinfo") as file:
        if "avx512_bf16" not in file.read():
            pytest.skip("this processor has no vector conversion to bfloat16")
    monkeypatch.setitem(registry._RULES, "neg", [r for r in registry._RULES["neg"] if r.platform != "cpu"])
    assert different() > 0
