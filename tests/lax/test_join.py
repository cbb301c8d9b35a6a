"""Joining arrays: the values of `lax.concatenate`, in one loop on a CPU."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.parts.xla.join import join
from tests.arrays import on_device
from tests.tiers import tiered

CASES = {
    "halves of heads": ((2, 5, 3, 4), (2, 5, 3, 4), 3),
    "neighbours": ((2, 5, 3, 1), (2, 5, 3, 1), 3),
    "in the middle": ((2, 3, 1, 4, 5), (2, 3, 6, 4, 5), 2),
    "in front": ((2, 5), (3, 5), 0),
    "one loop": ((1, 5, 2), (1, 5, 7), 2),
    "one is empty": ((2, 5, 0), (2, 5, 7), 2),
    "all are empty": ((2, 0, 3), (2, 0, 7), 2),
}


def arrays(name: str, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [on_device(rng.integers(0, 100, shape).astype(jnp.dtype(dtype))) for shape in CASES[name][:2]]


def joined_shapes(lowered: jax.stages.Lowered) -> list[str]:
    """Returns the shapes of what concatenations make."""
    return re.findall(r"stablehlo\.concatenate.*-> tensor<([0-9x]+)x", lowered.as_text())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", tiered(["float32", "bfloat16", "int8", "bool"], fast=["float32", "bool"]))
def test_values(name: str, dtype: str) -> None:
    x, axis = arrays(name, dtype), CASES[name][2]
    expected = np.concatenate(x, axis)
    assert_bits_equal(jax.jit(join, static_argnums=1)(x, axis), expected)
    assert_bits_equal(jax.jit(bijax.invariant(lambda *x: lax.concatenate(x, axis)))(*x), expected)
    if dtype == "float32":  # each piece is a program of its own
        assert_bits_equal(join(x, axis), expected)


@pytest.mark.parametrize("transform", [lambda f: f, bijax.invariant], ids=["join", "invariant"])
def test_derivatives_and_vmap(transform: Callable[..., Callable[..., jax.Array]]) -> None:
    x, y = arrays("halves of heads")
    by = (lambda x, y: join([x, y], 2)) if transform is not bijax.invariant else lambda x, y: jnp.concatenate([x, y], 2)
    weights = jnp.arange(2 * 5 * 6 * 4, dtype=jnp.float32).reshape(2, 5, 6, 4)
    gradients = jax.grad(transform(lambda x, y: (by(x, y) * weights).sum()), (0, 1))(x, y)
    for ours, wanted in zip(gradients, jnp.split(weights, 2, axis=2), strict=True):
        assert_bits_equal(ours, wanted)
    tangent = jax.jvp(transform(by), (x, y), (y, jnp.zeros_like(y)))[1]
    assert_bits_equal(tangent, jnp.concatenate([y, jnp.zeros_like(y)], 2))
    mapped = jax.vmap(transform(lambda x, y: by(x[None], y[None])), (0, None))(x, y[0])
    assert_bits_equal(mapped, jnp.concatenate([x, jnp.broadcast_to(y[:1], y.shape)], 2)[:, None])


def test_there_is_one_loop() -> None:
    """What compiles slowly in plain JAX is joined as matrices, where the dimensions before the axis are several."""
    x = arrays("halves of heads")
    plain = jax.jit(lambda *x: lax.concatenate(x, 3))
    assert joined_shapes(plain.lower(*x)) == ["2x5x3x8"]
    assert joined_shapes(jax.jit(bijax.invariant(plain)).lower(*x)) == ["30x8"]
    assert joined_shapes(jax.jit(lambda *x: join(x, 3)).lower(*x)) == ["30x8"]
    x = arrays("one loop")
    assert joined_shapes(jax.jit(lambda *x: join(x, 2)).lower(*x)) == ["1x5x9"]


def test_random_keys_and_unknown_shapes_stay_as_they_are() -> None:
    keys = jax.random.split(jax.random.key(0), (2, 3, 4))
    joined = jax.jit(bijax.invariant(lambda k: jnp.concatenate([k, k], 2)))(keys)
    assert_bits_equal(jax.random.key_data(joined), jax.random.key_data(jnp.concatenate([keys, keys], 2)))
    rows, _ = jax.export.symbolic_shape("rows,more")
    exported = jax.export.export(jax.jit(bijax.invariant(lambda x: jnp.concatenate([x, x], 2))))(
        jax.ShapeDtypeStruct((rows, 3, 4), jnp.float32)
    )
    x = jnp.ones((5, 3, 4))
    assert_bits_equal(exported.call(x), jnp.ones((5, 3, 8)))
