"""Compiled programs inside invariant functions: they run as they were compiled, so that must have been invariant."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device

X = on_device(np.random.default_rng(0).standard_normal((8, 300)), jnp.float32)
W = on_device(np.random.default_rng(1).standard_normal((300, 77)), jnp.float32)


def f(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ W) * 1.3


def ahead(fn: Callable[..., Any]) -> jax.stages.Compiled:
    return getattr(fn, "lower", jax.jit(fn).lower)(X).compile()


def loaded(program: jax.stages.Compiled) -> jax.stages.Compiled:
    return serialize_executable.deserialize_and_load(*serialize_executable.serialize(program))


def compiled_in_the_mode(fn: Callable[..., Any]) -> jax.stages.Compiled:
    with bijax.set_batch_invariant_mode():
        return ahead(fn)


def lowered_in_the_mode(fn: Callable[..., Any]) -> jax.stages.Compiled:
    with bijax.set_batch_invariant_mode():
        lowered = jax.jit(fn).lower(X)
    return lowered.compile()


def compiled_in_the_mode_after_lowering(fn: Callable[..., Any]) -> jax.stages.Compiled:
    lowered = jax.jit(fn).lower(X)
    with bijax.set_batch_invariant_mode():
        return lowered.compile()


NOT_INVARIANT: dict[str, Callable[[], jax.stages.Compiled]] = {
    "plain": lambda: ahead(f),
    "plain and loaded from bytes": lambda: loaded(ahead(f)),
    "lowered before the mode": lambda: compiled_in_the_mode_after_lowering(f),
    "invariant in part": lambda: ahead(lambda x: bijax.invariant(jax.jit(f))(x) @ W.T),
}
INVARIANT: dict[str, Callable[[], jax.stages.Compiled]] = {
    "from an invariant function": lambda: ahead(bijax.invariant(jax.jit(f))),
    "the same, loaded from bytes": lambda: loaded(ahead(bijax.invariant(jax.jit(f)))),
    "in the mode": lambda: compiled_in_the_mode(f),
    "lowered in the mode": lambda: lowered_in_the_mode(f),
}


@pytest.mark.parametrize("name", NOT_INVARIANT)
def test_what_was_not_made_invariant_raises(name: str) -> None:
    program = NOT_INVARIANT[name]()
    expected = program(X)
    assert callable(bijax.invariant(lambda x: x))  # the class of compiled programs looks at requests from now on
    with pytest.raises(bijax.NotInvariantError, match=r"call_compiled\(jit_.*test_compiled_programs\.py") as caught:
        bijax.invariant(lambda x: program(x) + 1)(X)
    assert caught.value.primitive == "call_compiled"
    with bijax.set_batch_invariant_mode(), pytest.raises(bijax.NotInvariantError, match="runs as it was compiled"):
        program(X)
    # Outside of a request, and where the caller lets it pass, it runs as ever.
    assert_bits_equal(program(X), expected)
    assert_bits_equal(bijax.invariant(lambda x: program(x), allow=("call_compiled",))(X), expected)
    with bijax.set_batch_invariant_mode(), bijax.set_batch_invariant_mode(False):
        assert_bits_equal(program(X), expected)


@pytest.mark.parametrize("name", INVARIANT)
def test_what_was_made_invariant_runs(name: str) -> None:
    program = INVARIANT[name]()
    expected = jax.jit(bijax.invariant(f))(X)
    for _ in range(2):
        assert_bits_equal(bijax.invariant(lambda x: program(x))(X), expected)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(program(X), expected)


def test_programs_in_which_nothing_is_variant() -> None:
    for fn in (lambda x: x + 1, lambda x: bijax.matmul(x, W), bijax.invariant(f)):
        program = ahead(fn)
        assert_bits_equal(bijax.invariant(lambda x, program=program: program(x))(X), program(X))


def test_while_another_program_is_traced() -> None:
    program = ahead(f)
    # A constant that the compiled program computes while the other one is traced.
    with pytest.raises(bijax.NotInvariantError, match="call_compiled"):
        jax.jit(bijax.invariant(lambda x: x[:, :77] + program(X)))(X)
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        jax.jit(bijax.invariant(lambda x: program(x), allow=("call_compiled",)))(X)


def test_programs_of_plain_jax_are_left_as_they_are() -> None:
    def text() -> str:
        return str(jax.jit(f).lower(X).as_text())

    before = text()
    bijax.invariant(f)(X)
    assert text() == before
    assert 'bijax = "invariant"' not in before
    with bijax.set_batch_invariant_mode():
        assert 'module @jit_f attributes {mhlo.frontend_attributes = {bijax = "invariant"}' in text()


def test_jitted_functions_that_are_inlined() -> None:
    inlined = jax.jit(f, inline=True)
    inlined(X)
    assert_bits_equal(jax.jit(bijax.invariant(lambda x: inlined(x)))(X), jax.jit(bijax.invariant(f))(X))
    expected = jax.jit(inlined).lower(X).as_text()
    assert jax.jit(bijax.invariant(lambda x: inlined(x))).lower(X).as_text() != expected
