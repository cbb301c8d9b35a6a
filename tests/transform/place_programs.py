"""Arrays that are made of equal elements, or of none that belongs to a row, and yet have another one for each row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _convolved(n: int) -> jax.Array:
    return lax.conv(jnp.ones((1, 1, n, n)), jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")[0, 0, :, 0]


def _in_groups(n: int) -> jax.Array:
    features = jnp.cumsum(jnp.ones(n))[None, :, None]
    numbers = ("NCH", "OIH", "NCH")
    found = lax.conv_general_dilated(
        features, jnp.ones((n, 1, 1)), (1,), "VALID", dimension_numbers=numbers, feature_group_count=n
    )
    return found[0, :, 0]


def _part_of_a_table(n: int) -> jax.Array:
    table = jnp.cumsum(jnp.ones(n + 3))
    return jax.vmap(lambda start: lax.dynamic_slice(table, (start,), (n,)))(jnp.full(2, 2))[1]


def _ragged(n: int) -> jax.Array:
    weights = jnp.stack([jnp.ones((3, 2)), 2 * jnp.ones((3, 2))])
    return lax.ragged_dot(jnp.ones((n, 3)), weights, jnp.array([1, n - 1]))[:, 0]


PLACES: dict[str, Callable[[int], jax.Array]] = {
    "prefix sums": lambda n: jnp.cumsum(jnp.ones(n)),
    "prefix products": lambda n: lax.cumprod(jnp.full(n, 1.5), reverse=True),
    "prefixes of logarithms": lambda n: lax.cumlogsumexp(jnp.zeros(n)),
    "collected by a loop": lambda n: lax.scan(lambda c, _: (c * 1.25, c), 1.0, None, length=n)[1],
    "windows": lambda n: lax.reduce_window(jnp.ones(n), 0.0, lax.add, (3,), (1,), "SAME"),
    "a convolution": _convolved,
    "groups of features": _in_groups,
    "a Fourier transform": lambda n: jnp.fft.fft(jnp.ones(n)).real,
    "places of the largest": lambda n: lax.top_k(jnp.ones(n + 2), n)[1].astype(jnp.float32),
    "a triangular system": lambda n: jax.scipy.linalg.solve_triangular(jnp.ones((n, n)), jnp.ones(n)),
    "a factor": lambda n: jnp.linalg.cholesky(jnp.ones((n, n)) + jnp.eye(n))[:, 0],
    "a part of a table": _part_of_a_table,
    "groups of rows": _ragged,
    "bytes of a number": lambda n: lax.bitcast_convert_type(jnp.ones(n // 4), jnp.uint8).reshape(n).astype(jnp.float32),
    "signs of zeros": lambda n: jnp.copysign(jnp.ones(n), np.where(np.arange(n) < 2, -0.0, 0.0).astype(np.float32)),
}
"""Maps the number of rows to one element for each."""


def channels(x: jax.Array, filters: jax.Array) -> jax.Array:
    """Returns a convolution along rows (n, length), each of which is a channel with its own filter."""
    numbers = ("NCH", "OIH", "NCH")
    found = lax.conv_general_dilated(
        x[None], filters[:, None], (1,), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[0]
    )
    return found[0]
