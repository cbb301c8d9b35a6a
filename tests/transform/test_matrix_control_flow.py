"""The transform with control flow, nested programs and custom rules: bits keep, no sum is left; plain JAX differs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.transform.compositions import PARAMS, X, dw_inside, dx_inside, dx_outside, forward, mlp

Params = dict[str, jax.Array]


def scanned(p: Params, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (mlp(p, c), None), x, None, length=2)[0]


def looped(p: Params, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, mlp(p, s[1])), (0, x))[1]


def chosen(p: Params, x: jax.Array) -> jax.Array:
    return lax.cond(p["g"][0] < 100.0, mlp, lambda p, x: mlp(p, x) * 2, p, x)


def nested(p: Params, x: jax.Array) -> jax.Array:
    return jax.jit(mlp)(p, jax.jit(lambda x: x * (x * x).sum(-1, keepdims=True))(x))


@jax.custom_vjp
def with_vjp(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w1"]) @ p["w2"]


def _with_vjp_fwd(p: Params, x: jax.Array) -> tuple[jax.Array, Any]:
    hidden = jnp.tanh(x @ p["w1"])
    return hidden @ p["w2"], (p, x, hidden)


def _with_vjp_bwd(saved: Any, g: jax.Array) -> tuple[Params, jax.Array]:
    p, x, hidden = saved
    dhidden = (g @ p["w2"].T) * (1 - hidden * hidden)
    return {**jax.tree.map(jnp.zeros_like, p), "w1": x.T @ dhidden, "w2": hidden.T @ g}, dhidden @ p["w1"].T


with_vjp.defvjp(_with_vjp_fwd, _with_vjp_bwd)


@jax.custom_jvp
def logsumexp(x: jax.Array) -> jax.Array:
    return jnp.log(jnp.exp(x).sum(-1))


@logsumexp.defjvp
def _logsumexp_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    y = logsumexp(primals[0])
    return y, (jnp.exp(primals[0] - y[..., None]) * tangents[0]).sum(-1)


def with_jvp(p: Params, x: jax.Array) -> jax.Array:
    return mlp(p, x) * logsumexp(x)[..., None]


PRODUCTS = "two products of matrices, whose rows have the same bits in all batches on some processors"

COMPOSITIONS = {
    "scan": forward(scanned, PARAMS, X),
    "scan dx outside": dx_outside(scanned, PARAMS, X),
    "while": forward(looped, PARAMS, X),
    "cond": forward(chosen, PARAMS, X),
    "nested jit": forward(nested, PARAMS, X),
    "remat dx outside": dx_outside(jax.checkpoint(mlp), PARAMS, X),
    "remat dx inside": dx_inside(jax.checkpoint(mlp), PARAMS, X),
    "custom_vjp dx outside": dataclasses.replace(dx_outside(with_vjp, PARAMS, X), no_control=PRODUCTS),
    "custom_vjp dx inside": dataclasses.replace(dx_inside(with_vjp, PARAMS, X), no_control=PRODUCTS),
    "custom_vjp dw inside": dataclasses.replace(dw_inside(with_vjp, PARAMS, X), no_control=PRODUCTS),
    "custom_jvp dx outside": dx_outside(with_jvp, PARAMS, X),
    "custom_jvp dx inside": dx_inside(with_jvp, PARAMS, X),
}


@pytest.mark.tier("full", fast=("scan",))
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_batch_size_changes_a_bit(name: str) -> None:
    COMPOSITIONS[name].check_with_control()
