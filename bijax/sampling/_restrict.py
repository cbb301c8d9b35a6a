"""The logits to sample from: after penalties, biases, bans and filters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.sampling._arguments import Request
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import scores_of
from bijax.sampling._filters import keep
from bijax.sampling._penalties import adjust


def what_is_left(request: Request, arithmetic: Arithmetic) -> jax.Array:
    """Returns logits (R, V), -inf for tokens that are not to be drawn.

    Where no row has a filter nothing is computed for them; at temperature 0 they have no effect.
    """
    adjusted = adjust(request.logits, request.penalties, request.bias, request.allowed, arithmetic)
    k, p, m = request.filters
    rows = request.temperature
    on = (k is not None and k > 0) | (p is not None and p < 1) | (m is not None and m > 0)
    if on is False:
        return adjusted
    restricted = on & (rows > 0)

    def restrict(adjusted: jax.Array) -> jax.Array:
        kept = keep(scores_of(adjusted, rows, arithmetic), request.filters, arithmetic)
        return jnp.where(kept | ~restricted[:, None], adjusted, np.float32(-np.inf))

    return lax.cond(restricted.any(), restrict, lambda adjusted: adjusted, adjusted)
