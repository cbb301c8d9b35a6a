"""Evidence for the table KEEP: operations that choose among values do not depend on the batch, ties and nan included.

Those of the tables CHOOSING and RACING are replaced on one platform or the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform._tables import (
    CHOOSING,
    COMPLEX,
    EXPANDED,
    FENCED,
    KEEP,
    ORDERED,
    RACING,
    RECURSE,
    ROUNDED,
    STABLE,
    VECTORS,
    Kind,
    verdict,
)
from bijax.transform.expansions import expansion_of
from tests.transform.choices import CHOICES, check_choices


@pytest.mark.tier("full", fast=("top_k-7", "scatter-max-7"))
@pytest.mark.parametrize("columns", [7, 300])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_do_not_depend_on_the_batch(name: str, columns: int) -> None:
    check_choices(jax.jit(CHOICES[name]), columns)


def test_no_primitive_is_in_two_tables() -> None:
    tables = [set(t) for t in (KEEP, CHOOSING, FENCED, VECTORS, ROUNDED, STABLE, RACING, ORDERED, EXPANDED, RECURSE)]
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_what_is_written_out_has_an_expansion() -> None:
    for names, dtype in ((EXPANDED, jnp.float32), (COMPLEX, jnp.complex64)):
        assert all(callable(expansion_of(name, (jnp.dtype(dtype),))) for name in names)
    assert expansion_of("dot_general", (jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)))
    assert expansion_of("dot_general", (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))) is None


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
