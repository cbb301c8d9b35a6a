"""Checks that raise errors, sparse matrices and spectra: code of other libraries, and of JAX's experimental parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import bijax
from bijax.testing import assert_bits_equal
from tests.transform.foreign_programs import FROM_CALLBACKS, FUNCTIONS, Function, X, checked

QUICK = ("error_if mapped", "error_if, gradient", "callbacks without results", "BCOO from the left", "welch")
WITHOUT_CALLBACKS = [name for name in FUNCTIONS if not name.startswith(("error_if", "callbacks"))]


@pytest.mark.tier("full", fault=QUICK)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    function = jax.jit(bijax.invariant(FUNCTIONS[name]))
    whole = function(X)
    for size in (1, 5) if name in QUICK else (1, 5, 16):
        assert_bits_equal(function(X[:size]), whole[:size])
    np.testing.assert_allclose(whole, jax.jit(FUNCTIONS[name])(X), rtol=2e-4, atol=1e-5)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_mode_gives_the_same_bits(name: str) -> None:
    whole = jax.jit(bijax.invariant(FUNCTIONS[name]))(X)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(jax.jit(lambda x: FUNCTIONS[name](x))(X), whole)
        if name not in QUICK:  # one program for each operation
            assert_bits_equal(FUNCTIONS[name](X), whole)


def test_control_plain_jax_changes_rows() -> None:
    """Of a program that `make test` runs as well; rows of the other ones have the same bits in plain JAX."""
    function = jax.jit(FUNCTIONS["error_if, gradient"])
    whole = np.asarray(function(X))
    assert any((np.asarray(function(X[:n])) != whole[:n]).any() for n in (1, 5, 16))


def test_lowered_for_cuda() -> None:
    # JAX lowers callbacks for a platform that is there.
    def program(x: jax.Array) -> list[Any]:
        return [FUNCTIONS[name](x) for name in WITHOUT_CALLBACKS]

    with bijax.lowering_for("sm_90"):
        jax.jit(bijax.invariant(program)).trace(X).lower(lowering_platforms=("cuda",))


def test_the_check_raises() -> None:
    function = jax.jit(bijax.invariant(checked))
    function(X)
    with pytest.raises(FROM_CALLBACKS, match="a nan"):
        jax.block_until_ready(function(with_first(np.nan)))


def with_first(number: float) -> np.ndarray:
    """Returns `X` with another first element."""
    x = np.array(X)
    x[0, 0] = number
    return x


def doubled(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: 2 * np.asarray(x), x, x)


def test_a_callback_in_a_branch_must_not_return() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, doubled, jnp.negative, x)

    program = jax.jit(bijax.invariant(function))
    assert_bits_equal(program(with_first(-1.0)), -with_first(-1.0))
    with pytest.raises(FROM_CALLBACKS, match=r"pure_callback\(float32\[17,40\]\), requested at .*test_for"):
        jax.block_until_ready(program(with_first(1.0)))
    (found,) = [o for o in bijax.audit(bijax.invariant(function), X).operations if o.primitive == "pure_callback"]
    assert (found.verdict, "NotInvariantError" in found.evidence) == ("invariant", True)
    allowed = jax.jit(bijax.invariant(function, allow=("pure_callback",)))
    assert_bits_equal(allowed(with_first(1.0)), 2 * with_first(1.0))
    (found,) = [o for o in bijax.audit(allowed, X).operations if o.primitive == "pure_callback"]
    assert found.verdict == "believed"


def selected(row: jax.Array) -> jax.Array:
    """Under vmap both branches run, and the results are selected."""

    def sine(row: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, row, row, vmap_method="expand_dims")

    return jax.lax.cond(row[0] > 0, sine, jnp.negative, row)


@pytest.mark.parametrize("function", [doubled, jax.vmap(selected)])
def test_a_callback_that_runs_in_any_case_is_refused(function: Function) -> None:
    with pytest.raises(bijax.NotInvariantError, match="pure_callback"):
        jax.jit(bijax.invariant(function)).lower(X)
    assert [o.primitive for o in bijax.audit(bijax.invariant(function), X).variant] == ["pure_callback"]


def test_a_callback_with_results_that_has_effects_is_refused() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: io_callback(np.sin, x, x), jnp.negative, x)

    with pytest.raises(bijax.NotInvariantError, match="io_callback"):
        jax.jit(bijax.invariant(function)).lower(X)
