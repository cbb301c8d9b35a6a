"""Random numbers by counting: one for each seed, position and column of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.sampling._arithmetic import Arithmetic, element
from pallas_kernels.parts.philox import philox

_LANES = 128
_WORDS = 4


def random_words(seeds: jax.Array, positions: jax.Array, columns: int) -> jax.Array:
    """Returns (R, columns) uint32 for seeds (R, 2) and positions (R,), uint32.

    The key of a row is its seed. Column c is word `c // 128 % 4` of counter (c // 512 * 128 + c % 128, position, 0, 0),
    so that it does not depend on the number of columns.
    """
    blocks = -(-columns // (_WORDS * _LANES))
    shape = positions.shape[0], blocks * _LANES
    number = lax.broadcasted_iota(jnp.uint32, shape, 1)
    nothing = jnp.zeros(shape, jnp.uint32)
    words = philox(
        (seeds[:, :1], seeds[:, 1:]), (number, jnp.broadcast_to(positions[:, None], shape), nothing, nothing)
    )
    stacked = jnp.stack([w.reshape(-1, blocks, _LANES) for w in words], axis=2)
    # Else XLA computes all words again for each element of the stack.
    words_apart: jax.Array = lax.optimization_barrier(stacked)
    return words_apart.reshape(-1, blocks * _WORDS * _LANES)[:, :columns]


def perturb(scores: jax.Array, seeds: jax.Array, positions: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Adds Gumbel noise to scores (R, V), so that the largest is a sample of their softmax."""
    return arithmetic.each(_perturb, scores, random_words(seeds, positions, scores.shape[1]))


@element
def _perturb(score: jax.Array, word: jax.Array) -> jax.Array:
    """Subtracts the logarithm of an exponential variable -log(1 - v) with v = (word + 1/2) / 2**32.

    Small v decide the argmax and keep all bits: log(1 - v) * v / (1 - (1 - v)) is log1p to a few units in the last
    place (Kahan). v is kept below 1.
    """
    v = jnp.minimum((word.astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    u = np.float32(1) - v
    exponential = jnp.where(u == 1, v, -jnp.log(u) * v / jnp.where(u == 1, np.float32(1), 1 - u))
    return score - jnp.log(exponential)
