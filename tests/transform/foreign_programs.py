"""Programs with code of other libraries, and of JAX's experimental parts."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback, sparse

from tests.arrays import on_device

Function = Callable[[jax.Array], Any]

X = on_device(np.random.default_rng(0).standard_normal((17, 40)), jnp.float32)
W = on_device(np.random.default_rng(1).standard_normal((40, 40)) / 6, jnp.float32)

FROM_CALLBACKS = (jax.errors.JaxRuntimeError, ValueError)
"""What JAX raises for an error in a callback."""


@functools.cache
def matrix(form: Any) -> Any:
    """Returns a sparse matrix in a form of `jax.experimental.sparse`; `fromdense` would compile forty programs."""
    whole = np.asarray(W)
    rows, columns = (x.astype(np.int32) for x in np.nonzero(np.abs(whole) > 0.2))
    starts = np.searchsorted(rows, np.arange(len(whole) + 1)).astype(np.int32)
    places, options = {
        sparse.BCOO: ((np.stack([rows, columns], axis=1),), {"indices_sorted": True, "unique_indices": True}),
        sparse.BCSR: ((columns, starts), {}),
        sparse.COO: ((rows, columns), {"rows_sorted": True}),
        sparse.CSR: ((columns, starts), {}),
    }[form]
    with jax.ensure_compile_time_eval():
        return form(tuple(map(jnp.asarray, (whole[rows, columns], *places))), shape=W.shape, **options)


def checked(x: jax.Array) -> jax.Array:
    x = eqx.error_if(x, jnp.isnan(x), "a nan")
    return jax.nn.softmax(jnp.tanh(x @ W) @ W)


def checkified(x: jax.Array) -> jax.Array:
    def f(x: jax.Array) -> jax.Array:
        checkify.check((x < 1e9).all(), "large")
        return jax.nn.softmax(x @ W)

    return checkify.checkify(f, errors=checkify.user_checks | checkify.float_checks)(x)[1]


def logged(x: jax.Array) -> jax.Array:
    io_callback(lambda _: None, None, x.sum(), ordered=True)
    io_callback(lambda _: None, None, x.sum())
    return jax.nn.softmax(x @ W)


def welch(x: jax.Array) -> jax.Array:
    return jax.scipy.signal.welch(x, nperseg=16)[1]


def by_data(x: jax.Array) -> jax.Array:
    """The gradient by the entries of a sparse matrix, of each row."""

    def loss(data: jax.Array, row: jax.Array) -> jax.Array:
        return ((sparse.BCOO((data, whole.indices), shape=whole.shape) @ row) ** 2).sum()

    whole = matrix(sparse.BCOO)
    return jax.vmap(jax.grad(loss), (None, 0))(whole.data, x)


FUNCTIONS: dict[str, Function] = {
    "error_if": checked,
    "error_if mapped": jax.vmap(checked),
    "error_if, gradient": jax.grad(lambda x: checked(x)[..., 0].sum()),
    "checkify": checkified,
    "callbacks without results": logged,
    "BCOO from the left": jax.vmap(lambda row: matrix(sparse.BCOO) @ row),
    "BCOO from the right": lambda x: x @ matrix(sparse.BCOO),
    "BCOO, gradient": jax.grad(lambda x: ((x @ matrix(sparse.BCOO)) ** 2).sum()),
    "BCOO, gradient by its data": by_data,
    "BCOO of each row": jax.vmap(lambda row: sparse.BCOO.fromdense(jnp.outer(row, row)[:6, :6], nse=36) @ row[:6]),
    "BCSR": lambda x: (matrix(sparse.BCSR) @ x.T).T,
    "COO": lambda x: (matrix(sparse.COO) @ x.T).T,
    "CSR": lambda x: (matrix(sparse.CSR) @ x.T).T,
    "welch": welch,
    "welch, gradient": jax.grad(lambda x: (welch(x) ** 2).sum()),
}
