"""`jax.numpy.einsum` of three and more operands: its order of contractions must not follow the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal

RNG = np.random.default_rng(0)
A, B, C = (RNG.standard_normal(shape).astype(np.float32) for shape in ((5, 6, 7), (7, 8), (8, 9)))
X = RNG.standard_normal((8, 5, 6)).astype(np.float32)
SIZES = (1, 5)

Function = Callable[[Any], Any]


def chain(x: Any) -> Any:
    return jnp.einsum("bij,ijk,kl->bil", x, A, B)


@jax.custom_vjp
def with_rule(x: Any) -> Any:
    return x.sum((1, 2))


with_rule.defvjp(
    lambda x: (with_rule(x), x),
    lambda x, g: (chain(x)[..., :6] * g[:, None, None],),
)

PROGRAMS: dict[str, Function] = {
    "values": chain,
    "ellipsis": lambda x: jnp.einsum("...ij,ijk,kl", x, A, B),
    "interleaved": lambda x: jnp.einsum(x, [0, 1, 2], A, [1, 2, 3], B, [3, 4], [0, 1, 4]),
    "optimal": lambda x: jnp.einsum("bij,ijk,kl->bil", x, A, B, optimize=True),
    "gradient": jax.grad(lambda x: jnp.sin(chain(x)).sum()),
    "gradient of a rule": jax.grad(lambda x: with_rule(x).sum()),
}


def differing(function: Function) -> int:
    whole = np.asarray(function(X)).view(np.uint32)
    return sum(int((np.asarray(function(X[:n])).view(np.uint32) != whole[:n]).sum()) for n in SIZES)


@pytest.mark.tier("full", fast=("values",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    function = PROGRAMS[name]
    assert differing(jax.jit(bijax.invariant(function))) == 0
    assert differing(jax.jit(function)), "the control has no difference"


@pytest.mark.tier("full")
def test_a_gradient_taken_outside() -> None:
    """The rule of a gradient is traced after the function has returned."""
    covered = bijax.invariant(lambda x: with_rule(x).sum())
    assert differing(jax.jit(jax.grad(covered))) == 0


def contractions(function: Function, x: Any) -> list[Any]:
    equations = jax.make_jaxpr(function)(x).eqns
    return [e.params["dimension_numbers"] for e in equations if e.primitive.name == "dot_general"]


def orders(function: Function) -> list[list[Any]]:
    return [contractions(function, X[:n]) for n in (*SIZES, 8)]


def test_the_order_is_that_of_sizes_that_are_assumed() -> None:
    one, five, eight = orders(bijax.invariant(chain))
    assert one == five == eight
    with bijax.set_batch_invariant_mode():
        assert orders(lambda x: chain(x)) == [one] * 3
    # Outside nothing changes, and the control of the order has two.
    one, five, eight = orders(lambda x: chain(x))
    assert one == five != eight
    first = [jnp.einsum_path("bij,ijk,kl->bil", X[:n], A, B)[0][0] for n in (5, 8)]
    assert first[0] != first[1]


def test_an_order_that_the_caller_gives_is_kept() -> None:
    for order in (False, [(1, 2), (0, 1)], [(0, 1), (0, 1)]):

        def given(x: Any, order: Any = order) -> Any:
            return jnp.einsum("bij,ijk,kl->bil", x, A, B, optimize=order)

        assert contractions(bijax.invariant(given), X) == contractions(given, X)


def test_lengths_of_sums_count() -> None:
    """A narrow middle, as of a low-rank update, is contracted first, whichever operand has the rows."""
    narrow, wide = np.zeros((64, 4), np.float32), np.zeros((4, 64), np.float32)
    x = np.zeros((8, 64), np.float32)
    for spec, operands in (("bi,ir,ro->bo", (x, narrow, wide)), ("ro,ir,bi->bo", (wide, narrow, x))):
        shapes = [
            e.outvars[0].aval.shape
            for e in jax.make_jaxpr(bijax.invariant(lambda *a, spec=spec: jnp.einsum(spec, *a)))(*operands).eqns
            if e.primitive.name == "dot_general"
        ]
        assert sorted(shapes[0]) == [4, 8]


@pytest.mark.tier("full")
def test_multi_dot() -> None:
    y = RNG.standard_normal((8, 7)).astype(np.float32)
    function = bijax.invariant(lambda y: jnp.linalg.multi_dot([y, B, C]))
    assert_bits_equal(jax.jit(function)(y[:1]), jax.jit(function)(y)[:1])
