"""The transform with convolution, embedding and routing to experts: bits keep, no sum is left; plain JAX differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.arrays import on_device
from tests.transform.compositions import (
    BATCH,
    DIM,
    PARAMS,
    X,
    dw_inside,
    dw_outside,
    dx_inside,
    dx_outside,
    forward,
    mlp,
    normal,
)

Params = dict[str, jax.Array]

CONV_PARAMS = {
    "first": normal(11, 3, 3, 6, 40, scale=0.2),
    "grouped": normal(12, 3, 3, 20, 40, scale=0.1),
    "w": normal(13, 40, 5),
}
IMAGES = normal(14, BATCH, 9, 9, 6)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolved(p: Params, x: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(x, p["first"], (2, 2), "SAME", dimension_numbers=LAYOUT)
    y = jax.nn.relu(y)
    y = lax.conv_general_dilated(y, p["grouped"], (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=2)
    return y.mean((1, 2)) @ p["w"]


TABLE = {"table": normal(15, 50, DIM), **PARAMS}
TOKENS = on_device(np.random.default_rng(16).integers(0, 50, (BATCH, 7)))


def embedded(p: Params, tokens: jax.Array) -> jax.Array:
    return mlp(p, p["table"][tokens].mean(1))


EXPERTS = {"w": normal(17, 4, DIM, 33, scale=0.1)}
EXPERT_OF_ROW = on_device(np.random.default_rng(18).integers(0, 4, BATCH))


def routed(p: Params, x: jax.Array) -> jax.Array:
    expert = EXPERT_OF_ROW[: len(x)]
    order = jnp.argsort(expert, stable=True)
    sizes = (expert[:, None] == jnp.arange(4)).sum(0).astype(jnp.int32)
    return jnp.zeros((len(x), 33)).at[order].set(lax.ragged_dot(x[order], p["w"], sizes))


COMPOSITIONS = {
    "conv": forward(convolved, CONV_PARAMS, IMAGES),
    "conv dx outside": dx_outside(convolved, CONV_PARAMS, IMAGES),
    "conv dx inside": dx_inside(convolved, CONV_PARAMS, IMAGES),
    "conv dw inside": dw_inside(convolved, CONV_PARAMS, IMAGES),
    "embedding": forward(embedded, TABLE, TOKENS),
    "embedding dw outside": dw_outside(embedded, TABLE, TOKENS),
    "embedding dw inside": dw_inside(embedded, TABLE, TOKENS),
    "ragged_dot": forward(routed, EXPERTS, X),
    "ragged_dot dx inside": dx_inside(routed, EXPERTS, X),
}


@pytest.mark.tier("full", fast=("embedding",))
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_batch_size_changes_a_bit(name: str) -> None:
    COMPOSITIONS[name].check_with_control()
