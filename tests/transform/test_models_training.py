"""Twenty steps of training: one batch of 32 gives the parameters of 2 × 16 and of 4 × 8, bit for bit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.arrays import on_device
from tests.transform.compositions import normal

STEPS, BATCH, UNIT = 20, 32, 8
X = normal(1, STEPS, BATCH, 77)
LABELS = on_device(np.random.default_rng(2).integers(0, 10, (STEPS, BATCH)))

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.gelu(nn.LayerNorm()(nn.Dense(130)(x))))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(77, 130, rngs=rngs), nnx.Linear(130, 10, rngs=rngs)
        self.norm = nnx.LayerNorm(130, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.gelu(self.norm(self.first(x))))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_model() -> tuple[Loss, Any]:
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), X[0])
    return lambda params, x, y: cross_entropy(model.apply(params, x), y), params


def nnx_model() -> tuple[Loss, Any]:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    return lambda params, x, y: cross_entropy(nnx.merge(graph, params)(x), y), params


OPTIMIZER = optax.adamw(1e-2)


@jax.jit
@bijax.invariant
def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


class Training:
    """Training of one model; its programs are compiled once for each number of parts.

    Attributes:
        loss_fn: Maps parameters, inputs and labels to the loss.
        params: What it starts with.
        gradient: The accumulated gradient of the loss.
    """

    def __init__(self, model: Callable[[], tuple[Loss, Any]]) -> None:
        self.loss_fn, self.params = model()
        self.gradient = bijax.accumulate_gradients(self.loss_fn, unit=UNIT)
        self._add = jax.jit(self.gradient.add)
        self._plain = jax.jit(jax.grad(self.loss_fn))

    def train(self, parts: int, *, invariant: bool = True) -> Any:
        """Trains with the batch cut into parts, which are added in a loop in Python."""
        params, state = self.params, OPTIMIZER.init(self.params)
        for x, y in zip(X, LABELS, strict=True):
            cut = list(zip(jnp.split(x, parts), jnp.split(y, parts), strict=True))
            if invariant:
                total = self.gradient.start(params, *cut[0])
                for part in cut:
                    total = self._add(total, params, *part)
                _, grads = total.value_and_grad()
            else:
                several = [self._plain(params, *part) for part in cut]
                grads = jax.tree.map(lambda *g: functools.reduce(jnp.add, g) / parts, *several)
            params, state = update(params, state, grads)
        return params


training = functools.cache(Training)


@pytest.mark.tier("full")
@pytest.mark.parametrize("model", [linen_model, nnx_model])
def test_accumulated_training(model: Callable[[], tuple[Loss, Any]]) -> None:
    run = training(model)
    whole = run.train(1)
    for parts in (2, 4):
        jax.tree.map(assert_bits_equal, run.train(parts), whole)
    assert run.loss_fn(whole, X[0], LABELS[0]) < run.loss_fn(run.params, X[0], LABELS[0])


@pytest.mark.tier("full")
def test_whole_step_in_one_program() -> None:
    """Gradient and optimizer in one jitted function give the bits of the loop in Python."""
    run = training(linen_model)

    @jax.jit
    @bijax.invariant
    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, grads = run.gradient(params, *batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry = (run.params, OPTIMIZER.init(run.params))
    for batch in zip(X, LABELS, strict=True):
        carry, _ = step(carry, batch)
    jax.tree.map(assert_bits_equal, carry[0], run.train(1))


@pytest.mark.tier("full")
def test_control_plain_training() -> None:
    run = training(linen_model)
    whole, parts = (run.train(parts, invariant=False) for parts in (1, 4))
    assert all((bits(a) != bits(b)).any() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True))
