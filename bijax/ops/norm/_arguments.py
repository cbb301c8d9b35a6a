"""Checks of what norms take besides their rows."""

import jax
import jax.numpy as jnp

from bijax.core.checks import real
from pallas_kernels.parts.xla.tiles import isolate


def check_eps(op: str, eps: float) -> float:
    """Returns `eps` as a float.

    Raises:
        TypeError: If it is not a number, or a traced one.
        ValueError: If it is negative or not finite.
    """
    return real(op, "eps", eps, least=0)


def add_offset(op: str, weight: jax.Array | None, weight_offset: float) -> jax.Array | None:
    """Returns `weight` plus `weight_offset` in float32, or `weight` as it is if the offset is 0.

    Raises:
        TypeError: If the offset is not a number, or is traced.
        ValueError: If it is not finite, or there is no weight to add it to.
    """
    weight_offset = real(op, "weight_offset", weight_offset)
    if weight_offset == 0:
        return weight
    if weight is None:
        raise ValueError(f"{op}: weight_offset={weight_offset} is added to weight, but got no weight; pass both.")
    # After a barrier, or a product that made the weight would be contracted with this sum.
    (weight,) = isolate(weight)
    return weight.astype(jnp.float32) + jnp.float32(weight_offset)
