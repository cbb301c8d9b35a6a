"""Arrays that are made of equal elements, or of none that belongs to a row, and yet have another one for each row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bijax
from bijax.testing import assert_bits_equal

TABLE = jnp.linspace(1, 2, 20)


def _counted(n: int, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return lax.scan(lambda i, _: (i + 1, function(i)), jnp.zeros((), jnp.int32), None, length=n)[1]


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
    "a branch of a counted number": lambda n: _counted(n, lambda i: lax.cond(i % 2 == 0, lambda: 1.0, lambda: 2.0)),
    "an entry at a counted number": lambda n: _counted(n, lambda i: lax.dynamic_index_in_dim(TABLE, i, 0, False)),
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


BY_ROW: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "a branch": lambda v, _: lax.cond(v > 0.5, lambda: 1.0, lambda: 2.0),
    "one of several branches": lambda _, i: lax.switch(i, [lambda: 1.0, lambda: 2.0, lambda: 3.0]),
    "a loop": lambda v, _: lax.while_loop(lambda c: c < v * 4, lambda c: c + 1, 0.0),
    "a part of a table": lambda _, i: lax.dynamic_slice(TABLE, (i,), (3,)).sum(),
    "written into a table": lambda _, i: lax.dynamic_update_slice(TABLE, jnp.zeros(2), (i,))[1],
    "padded": lambda v, _: lax.pad(TABLE, v, [(1, 1, 0)])[0],
    "windows": lambda v, _: lax.reduce_window(TABLE, v, lax.add, (3,), (1,), "VALID")[0],
    "a reduction": lambda v, _: lax.reduce(TABLE, v, lax.max, (0,)),
}
"""Functions of a number of a row, and of an integer, that are computed row by row, from arrays that belong to none."""


def by_row(function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns rows (n, length) plus a number for each, computed in a loop over the rows."""
    first = jnp.abs(x[:, 0])
    return x + lax.map(lambda row: function(*row), (first, (first * 2).astype(jnp.int32)))[:, None]


def channels(x: jax.Array, filters: jax.Array) -> jax.Array:
    """Returns a convolution along rows (n, length), each of which is a channel with its own filter."""
    numbers = ("NCH", "OIH", "NCH")
    found = lax.conv_general_dilated(
        x[None], filters[:, None], (1,), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[0]
    )
    return found[0]


def places(mesh: Mesh) -> None:
    """Compares programs whose eight rows are cut over eight devices with one device."""
    rng = np.random.default_rng(0)
    x, filters = (jnp.asarray(rng.standard_normal((8, n)), jnp.float32) for n in (5, 3))
    given = jax.device_put(x, NamedSharding(mesh, P("data")))
    programs: list[Callable[..., Any]] = [
        lambda x: [x * made(8)[:, None] for made in PLACES.values()],
        lambda x: [by_row(function, x) for function in BY_ROW.values()],
        lambda x: channels(x, filters),
        lambda x: channels(x, jnp.ones((8, 3))),
        lambda x: jnp.take_along_axis(x, jnp.broadcast_to(jnp.array([3, 0]), (8, 2)), axis=1),
    ]
    for program in programs:
        function = jax.jit(bijax.invariant(program))
        assert_bits_equal(function(given), function(x))
