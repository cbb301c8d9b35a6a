"""Products that plain code computes are not contracted with sums that are invariant, however they enter."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax import lax

import bijax
from bijax.testing import bits

Array = jax.Array
X, Y, Z = (jax.random.normal(jax.random.key(n), (33, 17)) for n in range(3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    """A container that may be changed."""

    a: Array


def frozen(a: Array) -> Any:
    """Returns a container of Flax."""
    return FrozenDict(a=a)  # type: ignore[no-untyped-call]


def _added(p: Any, z: Array) -> Array:
    return (p.a if isinstance(p, Held) else p["a"]) + z


def _in_mode(p: Array, z: Array) -> Array:
    with bijax.set_batch_invariant_mode():
        return p + z


def _closed(p: Array, z: Array) -> Array:
    return bijax.invariant(lambda z: p + z)(z)


def _partial(p: Array, z: Array) -> Array:
    return bijax.invariant(lambda f, z: f() + z)(jax.tree_util.Partial(lambda q: q, p), z)


def _loop(p: Array, z: Array) -> Array:
    """A loop of one step, which XLA replaces by its body."""
    return lax.fori_loop(0, 1, lambda _, c: Held(bijax.invariant(_added)(c, z)), Held(p)).a


WAYS: tuple[Callable[[Array, Array], Array], ...] = (
    lambda p, z: bijax.invariant(jnp.add)(p, z),
    lambda p, z: bijax.invariant(lambda c, z: c.real + z)(lax.complex(p, z), z),
    lambda p, z: bijax.invariant(_added)(Held(p), z),
    lambda p, z: bijax.invariant(_added)(frozen(p), z),
    lambda p, z: bijax.invariant(_added)(collections.OrderedDict(a=p), z),
    lambda p, z: bijax.invariant(jax.jit(_added))(Held(p), z),
    lambda p, z: jax.jit(lambda p, z: bijax.invariant(_added)(p, z))(Held(p), z),
    lambda p, z: jax.jit(_closed)(p, z),
    lambda p, z: jax.vmap(bijax.invariant(_added))(Held(p), z),
    _in_mode,
    _closed,
    _partial,
    _loop,
)


def different(way: Callable[[Array, Array], Array]) -> int:
    """Returns how many sums of a product computed outside are not sums of the rounded product."""
    found = jax.jit(lambda x, y, z: way(x * y, z))(X, Y, Z)
    return int((bits(found) != bits(np.asarray(X * Y) + np.asarray(Z))).sum())


def test_control() -> None:
    assert different(jnp.add) > 0


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_products_from_outside(number: int) -> None:
    assert different(WAYS[number]) == 0


def test_products_for_outside() -> None:
    """The other direction: a product that is invariant, in a sum of plain code."""
    kinds: tuple[Callable[[Array], Any], ...] = (lambda a: a, Held, frozen, lambda a: lax.complex(a, Z))
    for kind in kinds:
        product = bijax.invariant(lambda x, y, kind=kind: kind(x * y))
        leaf = jax.jit(lambda x, y, z, product=product: jax.tree.leaves(product(x, y))[0].real + z)
        np.testing.assert_array_equal(bits(leaf(X, Y, Z)), bits(np.asarray(X * Y) + np.asarray(Z)))
