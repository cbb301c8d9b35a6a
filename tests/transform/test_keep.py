"""Evidence for the table KEEP: operations that choose among values do not depend on the batch, ties and nan included.

Those of the tables CHOOSING and RACING are replaced on one platform or the other. And the registry of rules itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform.expansions import _rules
from bijax.transform.expansions._rules import COMPLEX, COMPLEX_ON_GPU, EXPANDED, written_out
from bijax.transform.rules import registry
from bijax.transform.rules.registry import Kind, Rule, find, named, register, verdict
from tests.transform.choices import CHOICES, check_choices


@pytest.mark.tier("full", fast=("top_k-7", "scatter-max-7"))
@pytest.mark.parametrize("columns", [7, 300])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_do_not_depend_on_the_batch(name: str, columns: int) -> None:
    check_choices(jax.jit(CHOICES[name]), columns)


DTYPES = [
    *((d,) for d in ("int32", "bool", "float32", "bfloat16", "float64", "float8_e5m2", "complex64")),
    *(("float32", d) for d in ("float64", "bfloat16", "int32", "bool")),
    *((d, "float32") for d in ("int32", "bool", "complex64", "float8_e5m2")),
]


def test_one_rule_holds_for_every_operation() -> None:
    for name in named():
        for dtypes in DTYPES:
            for platform in registry.PLATFORMS:
                find(name, tuple(map(jnp.dtype, dtypes)), platform)  # raises where two hold


def test_two_rules_for_one_case_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})
    register("same", Rule(Kind.KEEP, "one"))
    with pytest.raises(ValueError, match="got a second"):
        register("same", Rule(Kind.REPLACE, "another"))
    register("alike", Rule(Kind.KEEP, "one", dtypes=registry.is_real))
    register("alike", Rule(Kind.KEEP, "another", dtypes=registry.is_in_floats))
    with pytest.raises(RuntimeError, match="two rules for alike"):
        find("alike", (jnp.dtype(jnp.float32),), "cpu")
    with pytest.raises(ValueError, match="expected a platform"):
        register("elsewhere", Rule(Kind.KEEP, "", platform="tpu"))


def test_the_expansions_are_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their rules, what they serve is refused, not left to XLA."""
    rules = {name: [r for r in found if r.uses is not _rules._uses] for name, found in registry._RULES.items()}
    monkeypatch.setattr(registry, "_RULES", {name: found for name, found in rules.items() if found})
    x = np.eye(3, dtype=np.float32)
    for fn in (jnp.linalg.cholesky, lambda x: (x * 1j) @ x):
        with pytest.raises(bijax.NotInvariantError):
            jax.jit(bijax.invariant(lambda x, fn=fn: fn(x))).lower(x)


def test_what_is_written_out_has_an_expansion() -> None:
    for names, dtype in ((EXPANDED, "float32"), ([*COMPLEX.split(), *COMPLEX_ON_GPU.split()], "complex64")):
        aval, dtypes = jax.core.ShapedArray((3, 3), jnp.dtype(dtype)), (jnp.dtype(dtype),)
        assert all(callable(written_out(name, [aval], {}, dtypes, "cuda")) for name in names)
    for other, is_written_out in (("int8", True), ("bfloat16", False)):
        rule = find("dot_general", (jnp.dtype(other), jnp.dtype("float32")), "cpu")
        assert rule is not None
        assert (rule.uses is _rules._uses) == is_written_out


@pytest.mark.parametrize(
    ("name", "dtype", "platform", "kind"),
    [
        ("dot_general", jnp.float32, "cpu", Kind.REPLACE),
        ("dot_general", jnp.float32, "cuda", Kind.REPLACE),
        ("dot_general", jnp.int8, "cpu", Kind.KEEP),
        ("dot_general", jnp.complex64, "cpu", Kind.REPLACE),
        ("dot_general", jnp.float8_e5m2, "cpu", Kind.REPLACE),
        ("add", jnp.complex64, "cpu", Kind.KEEP),
        ("add", jnp.complex64, "cuda", Kind.REPLACE),
        ("acos", jnp.complex64, "cpu", Kind.REFUSE),
        ("mul", jnp.float32, "cpu", Kind.REPLACE),
        ("mul", jnp.float32, "cuda", Kind.REPLACE),
        ("mul", jnp.int32, "cuda", Kind.KEEP),
        ("exp", jnp.bfloat16, "cpu", Kind.REPLACE),
        ("add", jnp.float32, "cpu", Kind.KEEP),
        ("add", jnp.float32, "cuda", Kind.REPLACE),
        ("max", jnp.float32, "cpu", Kind.REPLACE),
        ("max", jnp.float32, "cuda", Kind.KEEP),
        ("max", jnp.int32, "cpu", Kind.KEEP),
        ("max", jnp.complex64, "cpu", Kind.KEEP),
        ("scatter", jnp.int32, "cpu", Kind.KEEP),
        ("scatter", jnp.int32, "cuda", Kind.REPLACE),
        ("scatter-max", jnp.float32, "cpu", Kind.REPLACE),
        ("scatter-max", jnp.float32, "cuda", Kind.REPLACE),
        ("scatter-max", jnp.int32, "cuda", Kind.KEEP),
        ("scan", jnp.float32, "cpu", Kind.RECURSE),
        ("bijax_matmul", jnp.float32, "cpu", Kind.KEEP),
        ("fft", jnp.float32, "cuda", Kind.REPLACE),
        ("cholesky", jnp.float32, "cuda", Kind.REPLACE),
        ("eig", jnp.float32, "cpu", Kind.REFUSE),
        ("a_new_primitive", jnp.float32, "cpu", Kind.ENTER),
    ],
)
def test_verdicts(name: str, dtype: Any, platform: str, kind: Kind) -> None:
    assert verdict(name, (jnp.dtype(dtype),), platform).kind is kind


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_generators_that_follow_the_batch_are_refused(kind: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    program = jax.jit(bijax.invariant(jax.vmap(lambda key: jax.random.normal(key, (7,)))))
    with pytest.raises(bijax.NotInvariantError, match="threefry2x32"):
        program(keys)


def test_threefry_whose_counter_follows_the_shape_is_refused() -> None:
    program = jax.jit(bijax.invariant(lambda key: jax.random.normal(key, (3, 7))))
    with jax.threefry_partitionable(False), pytest.raises(bijax.NotInvariantError, match="partitionable"):
        program(jax.random.key(0))


@pytest.mark.tier("full")
def test_threefry_that_is_not_partitionable_is_kept_where_no_shape_shows() -> None:
    def number(place: jax.Array) -> jax.Array:
        key, other = jax.random.split(jax.random.fold_in(jax.random.key(0), place))
        return jax.random.normal(key) * jax.random.uniform(other)

    with jax.threefry_partitionable(False):
        program = jax.jit(bijax.invariant(jax.vmap(number)))
        whole = program(jnp.arange(17))
        for size in (1, 2, 5):
            assert_bits_equal(program(jnp.arange(size)), whole[:size])
        with pytest.raises(bijax.NotInvariantError, match="partitionable"):
            jax.jit(bijax.invariant(lambda key: jax.random.split(key, 3))).lower(jax.random.key(0))


def test_the_caller_may_let_a_primitive_pass() -> None:
    found = verdict("eig", (jnp.dtype(jnp.complex64),), "cpu", ("eig",))
    assert (found.kind, found.allowed) == (Kind.ENTER, True)
