"""The transform with forward mode, second derivatives and vmap: bits keep, no sum is left; plain JAX differs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.transform.compositions import PARAMS, Composition, Function, Transform, X, mlp, squares

Params = dict[str, jax.Array]


def tangent(transform: Transform, p: Params, x: jax.Array) -> jax.Array:
    return jax.jvp(lambda x: transform(mlp)(p, x), (x,), (jnp.flip(x, -1),))[1]


def tangent_inside(transform: Transform, p: Params, x: jax.Array) -> jax.Array:
    return transform(lambda p, x: jax.jvp(lambda x: mlp(p, x), (x,), (jnp.flip(x, -1),))[1])(p, x)


def second_order(transform: Transform, p: Params, x: jax.Array) -> jax.Array:
    first = jax.grad(squares(transform(mlp)), argnums=1)
    return jax.grad(lambda x: (first(p, x) ** 2).sum())(x)


def jitted(program: Function) -> Composition:
    """A composition whose program takes the transform as its first argument."""
    return Composition(lambda transform: jax.jit(functools.partial(program, transform)), PARAMS, X)


def mapped(program: Function) -> Composition:
    return Composition(lambda transform: jax.jit(program(transform)), PARAMS, X)


COMPOSITIONS = {
    "jvp outside": jitted(tangent),
    "jvp inside": jitted(tangent_inside),
    "grad of grad": jitted(second_order),
    "vmap outside": mapped(lambda transform: jax.vmap(transform(mlp), (None, 0))),
    "vmap inside": mapped(lambda transform: transform(jax.vmap(mlp, (None, 0)))),
    "vmap of grad": mapped(lambda transform: jax.vmap(jax.grad(squares(transform(mlp)), argnums=1), (None, 0))),
}


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_batch_size_changes_a_bit(name: str) -> None:
    COMPOSITIONS[name].check_with_control()
