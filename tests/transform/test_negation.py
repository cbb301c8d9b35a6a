"""Negative subnormal numbers of bfloat16 keep their bits in a batch and alone, and a control without the rule."""

from pathlib import Path

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


def wrong() -> int:
    """Returns how many numbers do not have their own bits, in a batch and in a row alone."""
    run = jax.jit(bijax.invariant(jax.vmap(lambda x: chosen(x))))
    return sum(int((bits(run(x)) != np.where(np.asarray(x) > 0, 0x8001, 1)).sum()) for x in (X, X[:1]))


def test_negated_constants() -> None:
    assert wrong() == 0


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM's own negation, on processors that convert vectors to bfloat16 in one instruction."""
    processor = Path("/proc/cpuinfo")
    if not processor.exists() or "avx512_bf16" not in processor.read_text():
        pytest.skip("this processor has no vector conversion to bfloat16")
    monkeypatch.setitem(registry._RULES, "neg", [r for r in registry._RULES["neg"] if r.platform != "cpu"])
    assert wrong() > 0
