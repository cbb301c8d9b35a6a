"""Primitives that no table has: those whose lowering is JAX code are made invariant, others are refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.transform.foreign_primitives import FUNCTIONS, RULES, emitting, moving, primitive, product

X = on_device(np.random.default_rng(0).standard_normal((17, 250)), jnp.float32)
SIZES = (1, 17)

PRIMITIVES = {
    f"{function}_{rule}": primitive(f"foreign_{function}_{rule}", FUNCTIONS[function], RULES[rule](FUNCTIONS[function]))
    for function in FUNCTIONS
    for rule in RULES
}
INNER = PRIMITIVES["product_by_lower_fun"]
PRIMITIVES["nested"] = primitive("foreign_nested", lambda x: INNER.bind(jnp.sin(INNER.bind(x))) / (1 + x * x))
PRIMITIVES["moving"] = moving("foreign_moving")
EMITTING = emitting("foreign_emitting")

WAYS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "itself": lambda p, x: p.bind(x),
    "mapped": lambda p, x: jax.vmap(p.bind)(x),
    "scanned": lambda p, x: jax.lax.scan(lambda c, _: (p.bind(c) + x, None), x, None, length=2)[0],
    "in a branch": lambda p, x: jax.lax.cond(x.shape[1] > jnp.float32(3), p.bind, jnp.sin, x),
    "its gradient": lambda p, x: jax.grad(lambda x: (p.bind(x) ** 2).sum())(x),
}


def program(way: str) -> Callable[[jax.Array], dict[str, jax.Array]]:
    return lambda x: {name: WAYS[way](p, x) for name, p in PRIMITIVES.items()}


def differences(function: Callable[[jax.Array], dict[str, jax.Array]]) -> set[str]:
    """Returns the names of the results of which a row changes with the batch."""
    found, whole = set(), function(X)
    for size in SIZES:
        for name, rows in function(X[:size]).items():
            same = np.asarray(rows).view(np.uint32) == np.asarray(whole[name][:size]).view(np.uint32)
            found |= set() if same.all() else {name}
    return found


@pytest.mark.tier("full", fault=("mapped",))
@pytest.mark.parametrize("way", WAYS)
def test_rows_do_not_depend_on_the_batch(way: str) -> None:
    jitted = jax.jit(bijax.invariant(program(way)))
    assert differences(jitted) == set()
    for name, rows in program(way)(X).items():
        scale = 0.75 if "partial" in name and way in ("itself", "mapped") else None
        if scale is None and ("partial" in name or "two" in name):
            continue  # their rules compute something else than their derivatives and eager forms do
        expected = np.asarray(rows) * (scale or 1)
        np.testing.assert_allclose(jitted(X)[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_control_plain_jax_changes_rows() -> None:
    assert len(differences(jax.jit(program("itself")))) > 3


@pytest.mark.tier("fault")
def test_what_is_entered_has_the_bits_of_the_code_itself() -> None:
    expected = jax.jit(bijax.invariant(product))(X)
    assert_bits_equal(jax.jit(bijax.invariant(INNER.bind))(X), expected)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(jax.jit(lambda x: INNER.bind(x))(X), expected)
        assert_bits_equal(INNER.bind(X), expected)
    # Allowed or not: what can be entered is.
    allowed = bijax.invariant(INNER.bind, allow=(INNER.name,))
    assert_bits_equal(jax.jit(allowed)(X), expected)
    assert bijax.contracts(allowed, X) == bijax.contracts(bijax.invariant(product), X)


def test_code_that_was_traced_outside_is_entered_too() -> None:
    traced = jax.jit(lambda x: INNER.bind(x)).trace(X)
    with bijax.set_batch_invariant_mode():
        compiled = traced.lower().compile()
    assert_bits_equal(compiled(X), jax.jit(bijax.invariant(product))(X))


def test_a_program_holds_plain_and_invariant_calls() -> None:
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with bijax.set_batch_invariant_mode(False):
            plain = INNER.bind(x)
        return bijax.invariant(INNER.bind)(x), plain

    ours, plain = jax.jit(both)(X)
    assert_bits_equal(ours, jax.jit(bijax.invariant(product))(X))
    assert_bits_equal(plain, jax.jit(INNER.bind)(X))


def test_lowered_for_cuda_and_for_two_platforms() -> None:
    with bijax.lowering_for("sm_90"):
        for platforms in (("cuda",), ("cpu", "cuda")):
            jax.jit(bijax.invariant(program("itself"))).trace(X).lower(lowering_platforms=platforms)


def test_what_a_rule_emits_by_itself_is_refused() -> None:
    with pytest.raises(bijax.NotInvariantError, match=r"emits stablehlo\.multiply itself") as caught:
        jax.jit(bijax.invariant(EMITTING.bind)).lower(X)
    assert caught.value.primitive == EMITTING.name
    assert "test_entered.py" in caught.value.line
    (found,) = bijax.audit(bijax.invariant(EMITTING.bind), X).variant
    assert (found.verdict, found.primitive) == ("refused", EMITTING.name)
    assert "stablehlo.multiply" in found.evidence


@pytest.mark.tier("fault")
def test_what_is_allowed_is_what_a_rule_emits_and_no_more() -> None:
    allowed = bijax.invariant(EMITTING.bind, allow=(EMITTING.name,))
    rows = jax.jit(allowed)
    assert all((np.asarray(rows(X[:n])) == np.asarray(rows(X))[:n]).all() for n in SIZES)
    report = bijax.audit(allowed, X)
    assert report.invariant
    assert {o.primitive for o in report.operations if o.verdict == "believed"} >= {EMITTING.name}
    assert {o.verdict for o in report.operations if o.primitive in ("exp", "reduce_sum")} == {"replaced"}


def test_a_rule_for_all_platforms_goes_before_that_of_one() -> None:
    found = primitive("foreign_with_two_rules", product)
    jax.interpreters.mlir.register_lowering(found, lambda ctx, x: [x], platform="cpu")
    assert_bits_equal(jax.jit(bijax.invariant(found.bind))(X), jax.jit(bijax.invariant(product))(X))


def test_the_error_inside_names_the_operation_inside() -> None:
    found = primitive("foreign_with_callback", lambda x: jax.pure_callback(np.sin, x, x))
    with pytest.raises(bijax.NotInvariantError) as caught:
        jax.jit(bijax.invariant(found.bind)).lower(X)
    assert caught.value.primitive == "pure_callback"
    refused = [o.primitive for o in bijax.audit(bijax.invariant(found.bind), X).variant]
    assert refused == ["pure_callback"]


def test_the_audit_of_a_plain_program_judges_what_is_inside() -> None:
    plain, ours = bijax.audit(INNER.bind, X), bijax.audit(bijax.invariant(INNER.bind), X)
    assert {o.verdict for o in plain.operations if o.primitive in ("dot_general", "tanh")} == {"variant"}
    assert {o.verdict for o in ours.operations if o.primitive in ("dot_general", "tanh")} == {"replaced"}
    assert ours.invariant
    assert INNER.name not in {o.primitive for o in ours.operations}
