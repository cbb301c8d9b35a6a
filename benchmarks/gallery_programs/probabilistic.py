"""Sampling and densities."""

import blackjax
import distrax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal

X, Y = normal(0, 50, 10), normal(1, 50)


def _log_posterior(w: jax.Array) -> jax.Array:
    return -0.5 * ((X @ w - Y) ** 2).sum() - 0.5 * (w**2).sum()


def _chains(kernel) -> tuple[Function, tuple[jax.Array, jax.Array]]:
    def chain(start: jax.Array, key: jax.Array) -> jax.Array:
        def step(state, key):
            state, _ = kernel.step(key, state)
            return state, state.position

        return jax.lax.scan(step, kernel.init(start), jax.random.split(key, 10))[1]

    batch = (normal(2, EXAMPLES, 10), jax.random.split(jax.random.key(0), EXAMPLES))
    return lambda batch: jax.vmap(chain)(*batch), batch


def blackjax_hmc() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    return _chains(blackjax.hmc(_log_posterior, 1e-2, jnp.ones(10), 10))


def blackjax_nuts() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    return _chains(blackjax.nuts(_log_posterior, 1e-1, jnp.ones(10), max_num_doublings=4))


def _regression(x: jax.Array, y: jax.Array) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("features", 10):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.StudentT(4.0, x @ w, scale), obs=y)


def numpyro_density() -> tuple[Function, dict[str, jax.Array]]:
    def density(values: dict[str, jax.Array]) -> jax.Array:
        return jax.value_and_grad(lambda v: log_density(_regression, (X, Y), {}, v)[0])(values)

    return jax.vmap(density), {"w": normal(0, EXAMPLES, 10), "scale": jnp.exp(normal(1, EXAMPLES))}


def numpyro_predictive() -> tuple[Function, tuple[jax.Array, dict[str, jax.Array]]]:
    def predict(key: jax.Array, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        model = numpyro.handlers.substitute(numpyro.handlers.seed(_regression, key), values)
        return numpyro.handlers.trace(model).get_trace(X, None)["y"]["value"]

    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    values = {"w": normal(0, EXAMPLES, 10), "scale": jnp.exp(normal(1, EXAMPLES))}
    return lambda batch: jax.vmap(predict)(*batch), (keys, values)


def distrax_hmm() -> tuple[Function, jax.Array]:
    hmm = distrax.HMM(
        distrax.Categorical(logits=jnp.zeros(4)),
        distrax.Categorical(logits=normal(0, 4, 4)),
        distrax.Normal(jnp.arange(4.0), jnp.ones(4)),
    )
    return jax.vmap(lambda observed: hmm.forward(observed)), normal(1, EXAMPLES, 25)


def distrax_flow() -> tuple[Function, jax.Array]:
    w1, w2 = normal(0, 16, 128) / 4, normal(1, 128, 32) / 40

    def conditioner(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w1) @ w2).reshape(*x.shape[:-1], 16, 2)

    def bijector(params: jax.Array) -> distrax.Bijector:
        return distrax.ScalarAffine(params[..., 0], log_scale=params[..., 1])

    layers = [distrax.MaskedCoupling((jnp.arange(16) % 2) == i % 2, conditioner, bijector) for i in range(4)]
    base = distrax.MultivariateNormalDiag(jnp.zeros(16), jnp.ones(16))
    flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))
    return flow.log_prob, normal(2, EXAMPLES, 16)


PROGRAMS = (
    Program("blackjax: HMC, 10 steps of each chain", blackjax_hmc),
    Program("blackjax: NUTS, 10 steps of each chain", blackjax_nuts),
    Program("numpyro: log density and gradient of a regression", numpyro_density),
    Program("numpyro: predictive samples", numpyro_predictive),
    Program("distrax: hidden Markov model, forward", distrax_hmm),
    Program("distrax: normalizing flow", distrax_flow),
)
