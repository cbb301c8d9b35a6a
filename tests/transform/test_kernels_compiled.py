"""How many kernels XLA:CPU makes of a program. Each takes as long to compile as a hundred operations take to trace."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.transform.rules import results
from pallas_kernels.matmul.cpu.forms import panels
from pallas_kernels.parts.xla.row_major import LAYOUT, row_major
from pallas_kernels.parts.xla.tiles import isolate


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text: str | None = jax.jit(function).lower(*arrays).compile().as_text()
    assert text
    return text


def kernels(text: str) -> int:
    return text.count("kind=kLoop")


def columns_first(text: str) -> list[str]:
    """Returns the results of kernels that do not lie in memory row by row."""
    return re.findall(r"= \w+\[\d+,\d+\]\{0,1\} fusion\(", text)


def test_a_transpose_behind_a_barrier_is_one_pass() -> None:
    def turned(x: jax.Array) -> jax.Array:
        return isolate(row_major(x.T))[0] * 2

    def as_it_comes(x: jax.Array) -> jax.Array:
        """The control."""
        return isolate(x.T)[0] * 2

    assert not columns_first(compiled(turned, (40, 96)))
    assert columns_first(compiled(as_it_comes, (40, 96)))


def test_layouts_are_asked_for_on_the_cpu_alone() -> None:
    traced = jax.jit(lambda x: row_major(x.T)).trace(jax.ShapeDtypeStruct((4, 6), jnp.float32))
    cpu, cuda = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda"))
    assert LAYOUT in cpu
    assert LAYOUT not in cuda


def test_a_row_and_mapped_arrays_keep_their_values() -> None:
    x = jnp.arange(24.0).reshape(2, 3, 4)
    assert (jax.vmap(lambda x: row_major(x.T))(x) == x.swapaxes(1, 2)).all()
    assert row_major(x[0, 0]) is not None


def test_a_gradient_of_weights_is_computed_as_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX writes it as a product and a transpose of its result."""

    def gradient(w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        dw, dx = jax.vjp(lambda w, x: x @ w, w, x)[1](g)
        return dw, dx

    shapes = (34, 48), (20, 34), (20, 48)
    assert not columns_first(compiled(bijax.invariant(gradient), *shapes))
    monkeypatch.setattr(results, "arrangements", lambda jaxpr: dict.fromkeys(_products(jaxpr)))
    assert columns_first(compiled(bijax.invariant(gradient), *shapes))


def _products(jaxpr: jax.extend.core.Jaxpr) -> list[jax.extend.core.Var]:
    return [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("denominator", [(5, 1), (1, 7), (5, 7)])
def test_a_quotient_is_one_kernel(denominator: tuple[int, int]) -> None:
    def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
        return x / y

    assert kernels(compiled(bijax.invariant(quotient), (5, 7), denominator)) == 1


def test_further_blocks_of_a_sum_are_the_same_kernels() -> None:
    form = functools.partial(panels, k_block=32, transpose_w=True)
    three, six = (kernels(compiled(form, (4, 32 * blocks), (64, 32 * blocks))) for blocks in (3, 6))
    assert three == six
