"""Recurrent networks, and losses over sequences."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def haiku_lstm() -> tuple[Function, jax.Array]:
    def unroll(x: jax.Array) -> jax.Array:
        core = hk.LSTM(128)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return outputs

    net = hk.without_apply_rng(hk.transform(unroll))
    x = normal(0, EXAMPLES, 20, 64)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


def equinox_gru() -> tuple[Function, jax.Array]:
    cell = eqx.nn.GRUCell(64, 128, key=jax.random.key(0))

    def run(sequence: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(128), sequence)[0]

    return jax.vmap(run), normal(0, EXAMPLES, 20, 64)


def linen_rnn() -> tuple[Function, jax.Array]:
    net, x = linen.RNN(linen.OptimizedLSTMCell(128)), normal(0, EXAMPLES, 20, 64)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


def optax_ctc() -> tuple[Function, tuple[jax.Array, ...]]:
    logits = normal(0, EXAMPLES, 30, 20)
    labels = jax.random.randint(jax.random.key(1), (EXAMPLES, 8), 1, 20)
    batch = (logits, jnp.zeros((EXAMPLES, 30)), labels, jnp.zeros((EXAMPLES, 8)))
    return lambda batch: optax.ctc_loss(*batch), batch


PROGRAMS = (
    Program("haiku: LSTM", haiku_lstm),
    Program("equinox: GRU", equinox_gru),
    Program("flax linen: LSTM", linen_rnn),
    Program("optax: CTC loss", optax_ctc),
)
