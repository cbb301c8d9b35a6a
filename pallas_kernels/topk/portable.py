"""The largest numbers of rows by a sort, on any platform."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.topk.order import in_order, numbers_at


def largest(x: jax.Array, *, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the largest numbers of each row, and the numbers.

    Args:
        x: (T, E) float32, bfloat16 or float16.
        number: How many, in [0, E].

    Returns:
        places (T, number) int32, largest number first, ties in index order; and the numbers (T, number) in float32.

    Guarantee: row-invariant: nothing is rounded.

    Example:
        >>> places, numbers = largest(jnp.array([[0.0, 2.0, 2.0, 1.0]]), number=3)
        >>> places.tolist(), numbers.tolist()
        ([[1, 2, 3]], [[2.0, 2.0, 1.0]])
    """
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    places = lax.sort((~in_order(x), place), num_keys=2)[1][:, :number]
    return places, numbers_at(x, places)
