"""Normalizing flows and Gaussian processes."""

import equinox
import jax
import jax.numpy as jnp
import tinygp
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def flowjax_density() -> tuple[Function, jax.Array]:
    flow = masked_autoregressive_flow(jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=3, nn_width=32)
    return lambda x: flow.log_prob(x), normal(0, EXAMPLES, 4)


def flowjax_gradients() -> tuple[Function, jax.Array]:
    flow = masked_autoregressive_flow(jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=32)
    arrays, rest = equinox.partition(flow, equinox.is_inexact_array)

    def gradient(x: jax.Array):
        return jax.grad(lambda arrays: equinox.combine(arrays, rest).log_prob(x))(arrays)

    return jax.vmap(gradient), normal(0, EXAMPLES, 4)


def tinygp_likelihood() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    def likelihood(scale: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.linspace(0.0, 4.0, 20)

        def log_probability(scale: jax.Array) -> jax.Array:
            kernel = jnp.exp(scale[0]) * tinygp.kernels.Matern32(jnp.exp(scale[1]))
            return tinygp.GaussianProcess(kernel, x, diag=0.1).log_probability(y)

        return jax.value_and_grad(log_probability)(scale)

    return lambda batch: jax.vmap(likelihood)(*batch), (normal(0, EXAMPLES, 2) / 3, normal(1, EXAMPLES, 20))


PROGRAMS = (
    Program("flowjax: masked autoregressive flow", flowjax_density),
    Program("flowjax: gradients of each example", flowjax_gradients),
    Program("tinygp: log likelihood and gradient of a Gaussian process", tinygp_likelihood),
)
