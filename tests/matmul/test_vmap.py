"""Matmul and weight gradients under vmap: the bits of single calls, whichever operands are mapped."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops import weight_gradient
from bijax.testing import assert_bits_equal

ROWS = np.random.default_rng(0)
AXES = [axes for axes in itertools.product((None, 0), repeat=3) if any(a is not None for a in axes)]


def operand(*shape: int) -> jax.Array:
    return jnp.asarray(ROWS.standard_normal(shape), jnp.float32)


def singles(function: Callable[..., jax.Array], axes: tuple[int | None, ...], *args: jax.Array) -> jax.Array:
    size = next(a.shape[0] for a, d in zip(args, axes, strict=True) if d is not None)
    return jnp.stack(
        [function(*(a if d is None else a[i] for a, d in zip(args, axes, strict=True))) for i in range(size)]
    )


@pytest.mark.tier("full", fast=("(None, None, 0)", "(None, 0, None)", "(0, None, None)"))
@pytest.mark.parametrize("axes", AXES)
def test_products(axes: tuple[int | None, ...]) -> None:
    shapes = ((5, 40), (40, 24), (24,))
    x, w, bias = (operand(*(() if d is None else (3,)), *s) for d, s in zip(axes, shapes, strict=True))

    def multiply(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return bijax.matmul(x, w, bias=bias)

    assert_bits_equal(jax.vmap(multiply, axes)(x, w, bias), singles(multiply, axes, x, w, bias))


@pytest.mark.tier("full", fast=("(None, None, 0)",))
@pytest.mark.parametrize("axes", AXES)
def test_gradients(axes: tuple[int | None, ...]) -> None:
    shapes = ((130, 16), (130, 24), (16, 24))
    x, g, total = (operand(*(() if d is None else (3,)), *s) for d, s in zip(axes, shapes, strict=True))

    def gradient(x: jax.Array, g: jax.Array, total: jax.Array) -> jax.Array:
        return weight_gradient(x, g, accumulate=total)

    assert_bits_equal(jax.vmap(gradient, axes)(x, g, total), singles(gradient, axes, x, g, total))
    if axes[:2] != (None, None):
        assert_bits_equal(jax.vmap(weight_gradient, axes[:2])(x, g), singles(weight_gradient, axes[:2], x, g))


@pytest.mark.tier("full", fast=("True-(0, None)-(0, 0)",))
@pytest.mark.parametrize("inner", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("outer", [(0, None), (None, 0), (1, 2)])
@pytest.mark.parametrize("transpose", [False, True])
def test_nested(outer: tuple[int | None, ...], inner: tuple[int | None, ...], transpose: bool) -> None:
    def mapped(shape: tuple[int, ...], i: int) -> jax.Array:
        if inner[i] is not None:
            shape = (3, *shape)
        if outer[i] is not None:
            shape = (*shape[: outer[i]], 2, *shape[outer[i] :])
        return operand(*shape)

    cases = {
        functools.partial(bijax.matmul, transpose_w=transpose): ((5, 40), (24, 40) if transpose else (40, 24)),
        functools.partial(weight_gradient, transpose_w=transpose): ((5, 40), (5, 24)),
    }
    for function, shapes in cases.items():
        a, b = (mapped(shape, i) for i, shape in enumerate(shapes))
        found = jax.vmap(jax.vmap(function, inner), outer)(a, b)
        fronts = (a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip((a, b), outer, strict=True))
        axes = tuple(None if d is None else 0 for d in outer)
        assert_bits_equal(found, singles(lambda a, b, f=function: singles(f, inner, a, b), axes, *fronts))
