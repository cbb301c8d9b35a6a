"""The transform with jit and grad: bits keep, no sum is left; plain JAX differs."""

import jax
import pytest

import bijax
from tests.tiers import full_only
from tests.transform.compositions import (
    BATCH,
    PARAMS,
    SIZES,
    Composition,
    Function,
    Transform,
    X,
    dw_inside,
    dw_outside,
    dx_inside,
    dx_outside,
    forward,
    mlp,
)


def jitted_before(transform: Transform) -> Function:
    """A function whose programs without the transform are in JAX's caches."""
    jitted = jax.jit(mlp)
    for size in (BATCH, *SIZES):
        jitted(PARAMS, X[:size])
    return transform(jitted)


COMPOSITIONS = {
    "jit": forward(mlp, PARAMS, X),
    "eager": Composition(lambda transform: transform(mlp), PARAMS, X),
    "jitted before": Composition(jitted_before, PARAMS, X),
    "jit inside": Composition(lambda transform: transform(jax.jit(mlp)), PARAMS, X),
    "dx outside": dx_outside(mlp, PARAMS, X),
    "dx inside": dx_inside(mlp, PARAMS, X),
    "dw outside": dw_outside(mlp, PARAMS, X),
    "dw inside": dw_inside(mlp, PARAMS, X),
}


@pytest.mark.tier("full", fast=("dx inside",))
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_batch_size_changes_a_bit(name: str) -> None:
    COMPOSITIONS[name].check_with_control()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["jit", full_only("dw inside"), full_only("jitted before")])
def test_under_the_mode(name: str) -> None:
    composition = COMPOSITIONS[name]
    program = composition.build(lambda f: f)
    with bijax.set_batch_invariant_mode():
        composition.check(lambda f: program if name == "jitted before" else f)
