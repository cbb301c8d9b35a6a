"""Optax's element-wise optimizers as they are: an element's updates are the same in an array of any shape."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.tiers import tiered
from tests.transform.compositions import normal

OPTIMIZERS: Final[dict[str, Callable[[], optax.GradientTransformation]]] = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 3)),
    "adamw": lambda: optax.adamw(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adadelta": lambda: optax.adadelta(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "yogi": lambda: optax.yogi(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "rprop": lambda: optax.rprop(1e-2),
    "sign_sgd": lambda: optax.sign_sgd(1e-2),
    "clipped": lambda: optax.chain(optax.clip(0.5), optax.add_decayed_weights(1e-3), optax.sgd(1e-2)),
}
NOT_ELEMENT_WISE: Final[dict[str, Callable[[], optax.GradientTransformation]]] = {
    "clipped by the norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
}
OFTEN: Final = ("sgd", "adam", "lion", "rmsprop")
STEPS: Final = 3
SHAPE: Final = (3, 1, 45)


def trained(optimizer: optax.GradientTransformation, params: jax.Array, grads: jax.Array) -> jax.Array:
    """Returns the parameters after a step for each gradient."""

    @jax.jit
    @bijax.invariant
    def train(params: jax.Array, grads: jax.Array) -> jax.Array:
        def step(carry: Any, grads: jax.Array) -> tuple[Any, None]:
            params, state = carry
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0][0]

    found: jax.Array = train(params, grads)
    return found


def pair(name: str) -> tuple[jax.Array, jax.Array]:
    """Returns some elements trained alone, and the same ones out of an array that was trained."""
    params, grads = normal(1, *SHAPE), normal(2, STEPS, *SHAPE)
    optimizer = (OPTIMIZERS | NOT_ELEMENT_WISE)[name]()
    few = trained(optimizer, params[1, :, 2:13], grads[:, 1, :, 2:13])
    return few, trained(optimizer, params, grads)[1, :, 2:13]


@pytest.mark.parametrize("name", tiered(OPTIMIZERS, fast=OFTEN))
def test_an_elements_updates_do_not_depend_on_its_array(name: str) -> None:
    few, some = pair(name)
    assert bool(jnp.isfinite(few).all())
    assert_bits_equal(few, some)


def test_those_of_an_optimizer_that_takes_norms_do() -> None:
    """The control."""
    few, some = pair("clipped by the norm")
    assert (bits(few) != bits(some)).all()
