"""The products of rows by two matrices as one primitive: on a GPU one product, of which the second's columns are part.

Each column is a sum of its own, whose order depends neither on the number of columns nor on the place among them
(`bijax.dispatch.matmul`), so its bits are those of a product by one matrix.
"""

from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.matmul import Parameters, Product, multiply
from pallas_kernels.target import Target

COLUMNS: Final = 64
"""The columns of a joined product are a multiple of these: a Hopper GPU copies narrower rows of weights slowly."""


def _multiply(target: Target, x: jax.Array, w: jax.Array, other: jax.Array, *, product: Product) -> Arrays:
    missing = -(w.shape[1] + other.shape[1]) % COLUMNS
    if target.platform == "cuda":
        both = jnp.concatenate([w, other, jnp.zeros((w.shape[0], missing), w.dtype)], axis=1)
        return multiply(target, x, both, product=product)
    found = [multiply(target, x, a, product=product)[0] for a in (w, other)]
    return (jnp.concatenate([*found, jnp.zeros((x.shape[0], missing), found[0].dtype)], axis=1),)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays | None:
    """Folds a mapped x into more rows."""
    if any(axis is not None for axis in axes[1:]):
        return None
    (rows,) = fold_rows(size, arrays[:1], axes[:1])
    return unfold_rows(size, joined_matmul_kernel(rows, *arrays[1:], **parameters))


def _shape(x: jax.Array, w: jax.Array, other: jax.Array, *, product: Product) -> Arrays:
    columns = -(-(w.shape[1] + other.shape[1]) // COLUMNS) * COLUMNS
    return (jnp.zeros((x.shape[0], columns), product.out_dtype),)


joined_matmul_kernel: Final = define_kernel("joined_matmul", _multiply, _fold, _shape)
"""(M, K) x (K, N) and (K, N'): the columns of both products, and zeros up to a multiple of `COLUMNS`."""
