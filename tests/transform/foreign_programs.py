"""Programs with code of other libraries, and of JAX's experimental parts."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import checkify, io_callback, sparse

Function = Callable[[jax.Array], Any]

X = jax.random.normal(jax.random.key(0), (17, 40))

W = jax.random.normal(jax.random.key(1), (40, 40)) / 6

SPARSE = W * (jnp.abs(W) > 0.2)

BCOO, BCSR = sparse.BCOO.fromdense(SPARSE), sparse.BCSR.fromdense(SPARSE)

COO, CSR = sparse.COO.fromdense(SPARSE), sparse.CSR.fromdense(SPARSE)

FROM_CALLBACKS = (jax.errors.JaxRuntimeError, ValueError)
"""What JAX raises for an error in a callback."""


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
        return ((sparse.BCOO((data, BCOO.indices), shape=BCOO.shape) @ row) ** 2).sum()

    return jax.vmap(jax.grad(loss), (None, 0))(BCOO.data, x)


FUNCTIONS: dict[str, Function] = {
    "error_if": checked,
    "error_if mapped": jax.vmap(checked),
    "error_if, gradient": jax.grad(lambda x: checked(x)[..., 0].sum()),
    "checkify": checkified,
    "callbacks without results": logged,
    "BCOO from the left": jax.vmap(lambda row: BCOO @ row),
    "BCOO from the right": lambda x: x @ BCOO,
    "BCOO, gradient": jax.grad(lambda x: ((x @ BCOO) ** 2).sum()),
    "BCOO, gradient by its data": by_data,
    "BCOO of each row": jax.vmap(lambda row: sparse.BCOO.fromdense(jnp.outer(row, row)[:6, :6], nse=36) @ row[:6]),
    "BCSR": lambda x: (BCSR @ x.T).T,
    "COO": lambda x: (COO @ x.T).T,
    "CSR": lambda x: (CSR @ x.T).T,
    "welch": welch,
    "welch, gradient": jax.grad(lambda x: (welch(x) ** 2).sum()),
}
