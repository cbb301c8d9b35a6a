"""The weighted sum of each token's rows: order, mapped axes, and gradients of its gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops.moe._combine import _in_steps, combine
from bijax.ops.moe._experts import Shared
from bijax.testing import assert_bits_equal
from tests.moe.routing_cases import SUMS, rows_to_add

sums: Any = functools.partial(combine, shared=Shared(0, 0, 0), dtype="float32")


@pytest.mark.parametrize("shape", SUMS)
def test_order_of_sums(shape: tuple[int, int, int]) -> None:
    """Products and sums are rounded one by one, from the first expert on."""
    rows, row, weights = map(np.asarray, rows_to_add("wide", *shape, "float32"))
    weights = np.where(np.isfinite(weights), weights, 1).astype(np.float32)
    terms = np.where(row[..., None] >= 0, rows[np.maximum(row, 0)] * weights[..., None], np.float32(0))
    expected = functools.reduce(np.add, np.moveaxis(terms, 1, 0))
    assert_bits_equal(jax.jit(sums)(rows, row, weights), expected + np.float32(0))


@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 1, 0), (1, None, None)])
def test_mapped_sums_are_those_of_each_entry(axes: tuple[int | None, ...]) -> None:
    given = rows_to_add("normal", 9, 3, 32, "float32")
    stacked = [
        a if d is None else jnp.stack([a, a[::-1], jnp.roll(a, 2, 0)], d) for a, d in zip(given, axes, strict=True)
    ]
    found = jax.jit(jax.vmap(sums, axes))(*stacked)
    for i, one in enumerate(found):
        entry = [a if d is None else jnp.take(a, i, d) for a, d in zip(stacked, axes, strict=True)]
        assert_bits_equal(one, jax.jit(sums)(*entry))


def test_gradients_are_those_of_the_steps() -> None:
    rows, row, _ = rows_to_add("normal", 9, 3, 32, "float32")
    weights = jnp.asarray(np.random.default_rng(0).random(row.shape), jnp.float32)

    def gradients(function: Any) -> Any:
        def loss(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return bijax.sum(function(rows, row, weights), axis=(0, 1))

        return jax.jit(jax.grad(loss, (0, 1)))(rows, weights)

    steps: Any = functools.partial(_in_steps, shared=Shared(0, 0, 0), dtype="float32")
    for found, expected in zip(gradients(sums), gradients(steps), strict=True):
        assert_bits_equal(found, expected)


def test_twice_differentiated_gather() -> None:
    rows = rows_to_add("normal", 4, 2, 32, "float32")[0]
    offset = jnp.arange(8)

    def squared(weights: jax.Array) -> jax.Array:
        return bijax.sum(bijax.moe_gather(rows[:8], offset, weights) ** 2, axis=(0, 1))

    weights = jnp.full((4, 2), 0.5)
    second = jax.grad(lambda w: jax.grad(squared)(w)[0, 0])(weights)
    expected = 2 * np.asarray(rows[:2] @ rows[0])
    np.testing.assert_allclose(second[0], expected, rtol=1e-5)
    assert not np.asarray(second[1:]).any()
