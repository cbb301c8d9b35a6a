"""Programs of arrays without elements have the results of plain JAX, without elements too, and so have gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax

REAL = jax.ShapeDtypeStruct((0, 8), jnp.float32)
COMPLEX = jax.ShapeDtypeStruct((0, 8), jnp.complex64)
OUTSIDE = jnp.array([0, 2])

PROGRAMS: dict[str, tuple[Callable[[jax.Array], Any], jax.ShapeDtypeStruct]] = {
    "rfft": (jnp.fft.rfft, REAL),
    "irfft": (jnp.fft.irfft, COMPLEX),
    "hfft": (jnp.fft.hfft, COMPLEX),
    "irfft2": (lambda x: jnp.fft.irfft2(x[:, None].repeat(3, axis=1)), COMPLEX),
    "fft": (jnp.fft.fft, COMPLEX),
    "sort along no elements": (lambda x: jnp.sort(x, axis=0), REAL),
    "additions outside": (lambda x: x.at[OUTSIDE.astype(jnp.uint32)].add(1.0), REAL),
    "products outside": (lambda x: x.at[OUTSIDE].multiply(2.0, mode="clip"), REAL),
    "complex products outside": (lambda x: x.at[OUTSIDE].multiply(2.0, mode="drop"), COMPLEX),
    "maxima outside": (lambda x: x.at[OUTSIDE].max(1.0), REAL),
}


def gradient(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    def pulled(x: jax.Array) -> Any:
        y, pull = jax.vjp(function, x)
        return pull(y)

    return pulled


def types(results: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Returns the shapes and dtypes of results, all of which must be without elements."""
    assert not any(leaf.size for leaf in jax.tree.leaves(results))
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(results)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rows(name: str) -> None:
    function, shape = PROGRAMS[name]
    x = jnp.zeros(shape.shape, shape.dtype)
    assert types(jax.jit(bijax.invariant(function))(x)) == types(jax.jit(function)(x))
    if not name.endswith(("products outside", "maxima outside")):  # JAX has no such gradients
        assert types(jax.jit(bijax.invariant(gradient(function)))(x)) == types(jax.jit(gradient(function))(x))
