"""Sums that several devices compute parts of, as primitives: a subtree of a product's sum, and the top of a tree."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.contracts import is_recording, note, recorded_as
from bijax.core.primitive import Arrays, define_kernel, fold_rows, in_front, unfold_rows
from bijax.dispatch.kernels import run_kernel
from bijax.dispatch.matmul import Product, multiply, products_like
from pallas_kernels.contract import KSplitContract, add_as_tree, split_length
from pallas_kernels.registry import serves
from pallas_kernels.target import Target

Parameters = dict[str, Any]


def _leaves(target: Target, x: jax.Array, w: jax.Array, *, product: Product, leaves: int) -> Arrays:
    """Multiplies the leaves of K that a device has, `product.splits` of `leaves`, and adds them as a tree.

    A device that has all leaves also rounds. It is recorded as the others are, which add over devices before they
    round: the contracts do not name the number of devices.
    """
    length = KSplitContract(product.splits).leaf_length(x.shape[-1])  # as long as all leaves of the whole K
    if not is_recording() and _are_splits(target, x, w, product, length):
        return multiply(target, x, w, product=product)
    subtree = jnp.promote_types(product.out_dtype, jnp.float32).name
    with recorded_as(f"{x.dtype},{w.dtype} -> {subtree}"):
        note(add_as_tree, KSplitContract(leaves), arrays=(x, w))
        total = _add_leaves(target, x, w, replace(product, splits=1, out_dtype=subtree), product.splits, length)
    if product.splits < leaves or (subtree == product.out_dtype and not is_recording()):
        return (total,)
    with recorded_as(f"{subtree} -> {product.out_dtype}"):
        return _tree(target, total[None], out_dtype=product.out_dtype)


def _add_leaves(target: Target, x: jax.Array, w: jax.Array, leaf: Product, leaves: int, length: int) -> jax.Array:
    k_axis = 1 if leaf.transpose_w else 0

    def multiply_leaf(index: int) -> jax.Array:
        start = index * length
        columns = lax.slice_in_dim(w, start, start + length, axis=k_axis)
        return multiply(target, x[:, start : start + length], columns, product=leaf)[0]

    total: jax.Array = add_as_tree(multiply_leaf, leaves)
    return total


def _are_splits(target: Target, x: jax.Array, w: jax.Array, product: Product, length: int) -> bool:
    """Returns whether one kernel multiplies all leaves: those of its splits of K begin and end where the leaves do."""
    options = {"transpose_w": product.transpose_w, "bias": None, "out_dtype": product.out_dtype}
    return (
        product.splits > 1
        and split_length(x.shape[-1], product.splits) == length
        and serves("split_matmul", target, product.spec(x, w), x, w, **options)
    )


def _leaves_shape(x: jax.Array, w: jax.Array, *, product: Product, leaves: int) -> Arrays:
    return (products_like(x, w, transpose_w=product.transpose_w, out_dtype=product.out_dtype),)


def _fold_leaves(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays | None:
    if axes[1] is not None:
        return None
    (rows,) = fold_rows(size, arrays[:1], axes[:1])
    return unfold_rows(size, leaves_kernel(rows, arrays[1], **parameters))


def _tree(target: Target, terms: jax.Array, *, out_dtype: str) -> Arrays:
    return (run_kernel("tree_sum", target, None, terms, like=_sum_like, out_dtype=out_dtype),)


def _sum_like(terms: jax.Array, *, out_dtype: str) -> jax.Array:
    return jnp.zeros(terms.shape[1:], out_dtype)


def _tree_shape(terms: jax.Array, *, out_dtype: str) -> Arrays:
    return (_sum_like(terms, out_dtype=out_dtype),)


def _fold_tree(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    (terms,) = in_front(size, arrays, axes)
    return tree_kernel(jnp.moveaxis(terms, 0, 1), **parameters)


leaves_kernel = define_kernel("k_split_matmul", _leaves, _fold_leaves, _leaves_shape)
"""(M, K / D) x (K / D, N), or (N, K / D) with `transpose_w`: a device's subtree of a product under `KSplitContract`."""

tree_kernel = define_kernel("tree_sum", _tree, _fold_tree, _tree_shape)
"""(n, ...) terms to their sum under `TreeContract`, rounded once."""
