"""Recurrent cells and attention as Flax and Equinox write them: functions of one example, their weights inside."""

from collections.abc import Callable
from typing import Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from tests.arrays import on_device
from tests.fuzz.programs import unequal

Cell = Callable[[jax.Array, jax.Array], jax.Array]
INPUTS, HIDDEN, TIME = 19, 40, 5


def _equinox_gru() -> Cell:
    return eqx.nn.GRUCell(INPUTS, HIDDEN, key=jax.random.key(0))


def _equinox_lstm() -> Cell:
    cell = eqx.nn.LSTMCell(INPUTS, HIDDEN, key=jax.random.key(1))
    return lambda x, h: jnp.concatenate(cell(x, (h, h * 0.5)))


def _equinox_attention() -> Cell:
    attention = eqx.nn.MultiheadAttention(4, HIDDEN, key=jax.random.key(2))

    def cell(x: jax.Array, h: jax.Array) -> jax.Array:
        tokens = jnp.outer(jnp.linspace(-1, 1, TIME), h) + jnp.tile(x, 3)[:HIDDEN]
        return attention(tokens, tokens, tokens).reshape(-1)

    return cell


def _linen_gru() -> Cell:
    cell = linen.GRUCell(HIDDEN)
    variables = cell.init(jax.random.key(3), jnp.ones(HIDDEN), jnp.ones(INPUTS))
    return lambda x, h: cell.apply(variables, h, x)[1]


def _linen_lstm() -> Cell:
    cell = linen.OptimizedLSTMCell(HIDDEN)
    variables = cell.init(jax.random.key(4), (jnp.ones(HIDDEN), jnp.ones(HIDDEN)), jnp.ones(INPUTS))
    return lambda x, h: jnp.concatenate(cell.apply(variables, (h, h * 0.5), x)[0])


def _linen_attention() -> Cell:
    attention = linen.MultiHeadDotProductAttention(4)
    variables = attention.init(jax.random.key(5), jnp.ones((TIME, HIDDEN)))

    def cell(x: jax.Array, h: jax.Array) -> jax.Array:
        tokens = jnp.outer(jnp.linspace(-1, 1, TIME), h) + jnp.tile(x, 3)[:HIDDEN]
        return attention.apply(variables, tokens).reshape(-1)

    return cell


def _nnx_gru() -> Cell:
    cell = nnx.GRUCell(INPUTS, HIDDEN, rngs=nnx.Rngs(6))
    return lambda x, h: cell(h, x)[1]


def _nnx_lstm() -> Cell:
    cell = nnx.LSTMCell(INPUTS, HIDDEN, rngs=nnx.Rngs(7))
    return lambda x, h: jnp.concatenate(cell((h, h * 0.5), x)[0])


CELLS: Final[dict[str, Callable[[], Cell]]] = {
    "equinox GRU": _equinox_gru,
    "equinox LSTM": _equinox_lstm,
    "equinox attention": _equinox_attention,
    "linen GRU": _linen_gru,
    "linen LSTM": _linen_lstm,
    "linen attention": _linen_attention,
    "nnx GRU": _nnx_gru,
    "nnx LSTM": _nnx_lstm,
}


def sizes_that_differ(cell: Cell, transform: Callable[[Cell], Cell], sizes: tuple[int, ...], scan: bool) -> list[int]:
    """Returns the sizes of the batch at which bits differ from those in the largest, the last of `sizes`."""

    def step(x: jax.Array, h: jax.Array) -> jax.Array:
        return jax.vmap(cell)(x, h)

    def steps(x: jax.Array, h: jax.Array) -> jax.Array:
        def body(h: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = step(x * scale, h)
            return out[:, :HIDDEN], out

        return jax.lax.scan(body, h, jnp.linspace(0.5, 1.5, TIME))[1].swapaxes(0, 1)

    draw = np.random.default_rng(0)
    x, h = (on_device(draw.standard_normal((sizes[-1], n)), jnp.float32) for n in (INPUTS, HIDDEN))
    run = jax.jit(transform(steps if scan else step))
    expected = np.asarray(run(x, h))
    return [n for n in sizes[:-1] if unequal(expected[:n], np.asarray(run(x[:n], h[:n])))]
