"""Log-probabilities of tokens that were drawn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import scores_of
from bijax.sampling._order import NO_TOKEN


class Measured(NamedTuple):
    """The fields of `Sampled` about tokens, by the same names."""

    logprobs: jax.Array
    sampled_logprobs: jax.Array
    top_logprobs: jax.Array
    top_tokens: jax.Array


def measure(
    logits: jax.Array,
    left: jax.Array,
    temperature: jax.Array,
    tokens: jax.Array,
    num_top: int,
    arithmetic: Arithmetic,
) -> Measured:
    """Returns the log-probabilities of tokens (R,), -1 for none.

    Args:
        logits: (R, V), the model's own.
        left: (R, V), those that were drawn from.
        temperature: (R,).
        tokens: The tokens.
        num_top: Number of the largest to return.
        arithmetic: How to compute.
    """
    scores = scores_of(left, temperature, arithmetic)
    # One call, since it takes long to compile.
    logprobs, last = jnp.split(arithmetic.log_softmax(jnp.concatenate([logits, scores])), 2)
    top_logprobs, top_tokens = lax.top_k(logprobs, num_top)
    sampled = jnp.where(temperature > 0, _at(last, tokens), np.float32(0))
    sampled = jnp.where(tokens == NO_TOKEN, np.float32(np.nan), sampled)
    return Measured(_at(logprobs, tokens), sampled, top_logprobs, top_tokens.astype(jnp.int32))


def _at(logprobs: jax.Array, tokens: jax.Array) -> jax.Array:
    found = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(tokens == NO_TOKEN, np.float32(np.nan), found)
