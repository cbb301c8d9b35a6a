"""The transform with Flax Linen and Flax NNX: bits keep, no sum is left; plain JAX differs."""

from typing import Any

import jax
import pytest
from flax import linen as nn
from flax import nnx

from tests.transform.compositions import (
    BATCH,
    Composition,
    dw_inside,
    dx_outside,
    forward,
    normal,
    squares,
)

WIDTH = 76
SEQUENCES = normal(19, BATCH, 7, WIDTH)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(x, x)
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(300)(nn.LayerNorm()(x))))


def filled(shapes: Any) -> Any:
    """Returns random parameters: the initializers of the layers would be compiled."""
    leaves, structure = jax.tree.flatten(shapes)
    return structure.unflatten([normal(i, *leaf.shape, scale=0.1) for i, leaf in enumerate(leaves)])


BLOCK = Block()
BLOCK_PARAMS = filled(jax.eval_shape(BLOCK.init, jax.random.key(0), SEQUENCES[:1]))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, WIDTH, WIDTH, decode=False, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(nnx.gelu(self.norm(x + self.attention(x))))


LAYER = nnx.eval_shape(lambda: Layer(nnx.Rngs(0)))
nnx.update(LAYER, filled(nnx.state(LAYER)))


def call(layer: Layer, x: jax.Array) -> Any:
    return layer(x)


COMPOSITIONS = {
    "linen": forward(BLOCK.apply, BLOCK_PARAMS, SEQUENCES),
    "linen dx outside": dx_outside(BLOCK.apply, BLOCK_PARAMS, SEQUENCES),
    "linen dw inside": dw_inside(BLOCK.apply, BLOCK_PARAMS, SEQUENCES),
    "nnx.jit": Composition(lambda transform: nnx.jit(transform(call)), LAYER, SEQUENCES),
    "nnx.grad outside": Composition(
        lambda transform: nnx.jit(nnx.grad(squares(transform(call)), argnums=1)), LAYER, SEQUENCES
    ),
    "nnx.grad inside": Composition(
        lambda transform: nnx.jit(transform(nnx.grad(squares(call), argnums=1))), LAYER, SEQUENCES
    ),
}


@pytest.mark.tier("full", fast=("nnx.jit",))
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_batch_size_changes_a_bit(name: str) -> None:
    COMPOSITIONS[name].check_with_control()
