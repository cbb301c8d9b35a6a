"""Training: gradients of each example, and a model for each example."""

import jax
import jax.numpy as jnp
import optax
from flax import linen

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def optax_fits() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    optimizer = optax.adam(1e-2)

    def fit(x: jax.Array, y: jax.Array) -> jax.Array:
        def step(carry, _):
            w, state = carry
            grads = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
            updates, state = optimizer.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        w = jnp.zeros(32)
        return jax.lax.scan(step, (w, optimizer.init(w)), length=20)[0][0]

    return lambda batch: jax.vmap(fit)(*batch), (normal(0, EXAMPLES, 64, 32), normal(1, EXAMPLES, 64))


def linen_example_gradients() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    net = linen.Sequential([linen.Dense(128), linen.tanh, linen.Dense(10)])
    x, labels = normal(0, EXAMPLES, 64), jnp.arange(EXAMPLES) % 10
    params = net.init(jax.random.key(0), x)

    def gradient(x: jax.Array, label: jax.Array) -> jax.Array:
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), label)

        clip = optax.clip_by_global_norm(1.0)
        return clip.update(jax.grad(loss)(params), clip.init(params))[0]

    return lambda batch: jax.vmap(gradient)(*batch), (x, labels)


PROGRAMS = (
    Program("optax: Adam, a fit for each example", optax_fits),
    Program("flax linen and optax: clipped gradients of each example", linen_example_gradients),
)
