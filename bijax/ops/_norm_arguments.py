"""Checks of what norms take besides their rows."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels._tiles import isolate


def check_eps(op: str, eps: float) -> float:
    """Returns `eps` as a float.

    Raises:
        ValueError: If it is negative or not finite.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: eps must be a finite number of at least 0, got {eps}.")
    return float(eps)


def add_offset(op: str, weight: jax.Array | None, weight_offset: float) -> jax.Array | None:
    """Returns `weight` plus `weight_offset` in float32, or `weight` as it is if the offset is 0.

    Raises:
        ValueError: If the offset is not finite, or there is no weight to add it to.
    """
    if not math.isfinite(weight_offset):
        raise ValueError(f"{op}: weight_offset must be a finite number, got {weight_offset}.")
    if weight_offset == 0:
        return weight
    if weight is None:
        raise ValueError(f"{op}: weight_offset={weight_offset} is added to weight, but got no weight; pass both.")
    # Behind a barrier, or a product that made the weight would be contracted with this sum.
    (weight,) = isolate(weight)
    return weight.astype(jnp.float32) + jnp.float32(weight_offset)
