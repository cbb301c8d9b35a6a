"""Checks of what norms take besides their rows."""

import jax
import numpy as np

from bijax.core.checks import real


def check_eps(op: str, eps: float) -> float:
    """Returns `eps` as a float.

    Raises:
        TypeError: If it is not a number, or a traced one.
        ValueError: If it is negative or not finite.
    """
    return real(op, "eps", eps, least=0)


def check_offset(op: str, weight: jax.Array | None, weight_offset: float) -> float:
    """Returns `weight_offset` as float32 has it.

    Raises:
        TypeError: If the offset is not a number, or is traced.
        ValueError: If it is not finite, or there is no weight to add it to.
    """
    weight_offset = real(op, "weight_offset", weight_offset)
    if weight is None and weight_offset != 0:
        raise ValueError(f"{op}: weight_offset={weight_offset} is added to weight, but got no weight; pass both.")
    return float(np.float32(weight_offset))
