"""Changes to logits before scaling: penalties, biases, and banned tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.sampling._arithmetic import Arithmetic, element


class Penalties(NamedTuple):
    """Penalties of rows.

    Attributes:
        repetition: (R,) float32.
        frequency: (R,) float32.
        presence: (R,) float32.
        in_prompt: (R, V) bool, whether a token is in the prompt.
        output_counts: (R, V) int32, how often a token is in the output.
    """

    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array
    in_prompt: jax.Array
    output_counts: jax.Array


def adjust(
    logits: jax.Array,
    penalties: Penalties | None,
    bias: jax.Array | None,
    allowed: jax.Array | None,
    arithmetic: Arithmetic,
) -> jax.Array:
    """Returns the logits (R, V) that are left; -inf for tokens that are not allowed."""
    if penalties is not None:
        logits = arithmetic.each(
            _penalise,
            logits,
            penalties.in_prompt,
            penalties.output_counts,
            *(p[:, None] for p in (penalties.repetition, penalties.frequency, penalties.presence)),
        )
    if bias is not None:
        logits = arithmetic.each(_add, logits, bias)
    if allowed is not None:
        logits = jnp.where(allowed, logits, np.float32(-np.inf))
    return logits


@element
def _penalise(
    x: jax.Array,
    in_prompt: jax.Array,
    count: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    x = jnp.where(in_prompt | (count > 0), repeated, x)
    x = x - frequency * count.astype(jnp.float32)
    return jnp.where(count > 0, x - presence, x)


@element
def _add(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias
