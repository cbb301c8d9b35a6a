"""On a Hopper GPU the result of a product is computed in the order in which it is wanted; the other one is a copy."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.dispatch.matmul import Product
from bijax.lax import dot_general as module
from bijax.lax.dot_general import Arrangement
from bijax.transform.rules import results

A, B = ((64, 128), (256, 64)), ((128, 64), (64, 256))
"""Both with K = 64: the first stored by columns times one stored by rows, and the reverse."""


def product(rows: bool, transposed: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    contracting = ((1,), (0,)) if rows else ((0,), (1,))

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        y = lax.dot_general(a, b, (contracting, ((), ())))
        return y.T if transposed else y

    return multiply


def computed(function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> list[str]:
    """Returns the shapes of what kernels compute."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with bijax.lowering_for("sm_90"):
        lowered = jax.jit(bijax.invariant(function)).trace(*arrays).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @mosaic_gpu.* -> tensor<(\d+x\d+)xbf16>", lowered.as_text())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_results_lie_as_they_are_wanted(rows: bool, transposed: bool) -> None:
    wanted = "256x128" if transposed else "128x256"
    assert computed(product(rows, transposed), *(B if rows else A)) == [wanted]


def test_two_transpositions_are_none() -> None:
    assert computed(lambda a, b: product(rows=True, transposed=True)(a, b).T, *B) == ["128x256"]


def test_without_knowing_it_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(results, "arrangements", lambda jaxpr: dict.fromkeys(_products(jaxpr)))
    assert computed(product(rows=False, transposed=False), *A) == ["256x128"]


def _products(jaxpr: jax.extend.core.Jaxpr) -> list[jax.extend.core.Var]:
    return [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


def test_an_operand_is_not_copied_that_is_larger_than_the_result() -> None:
    """Sums are longer than a row of the result here, so a copy of the result is the smaller one."""
    assert computed(product(rows=False, transposed=False), (512, 48), (64, 512)) == ["64x48"]


@pytest.mark.parametrize("arrangement", Arrangement)
@pytest.mark.parametrize("storage", ["bkm,bkn", "bmk,bkn", "bkm,bnk", "bmk,bnk"])
def test_every_arrangement_is_the_product(storage: str, arrangement: Arrangement) -> None:
    """With the kernels of the CPU, which take the same operands."""
    sizes = {"b": 2, "m": 40, "n": 48, "k": 34}
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal([sizes[c] for c in part]).astype(np.float32) for part in storage.split(",")]
    left, right = (
        module._Operand.of(jnp.asarray(array), (0,), (part.index("k"),))
        for array, part in zip(arrays, storage.split(","), strict=True)
    )
    found = jax.jit(lambda: module._arranged_product(left, right, Product("float32"), arrangement))()
    expected = np.einsum(f"{storage}->bmn", *(a.astype(np.float64) for a in arrays))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
