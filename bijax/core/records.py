"""Kernels of records: a primitive binds the leaves, and the tree says which arrays they are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bijax.core.primitive import Arrays, Kernel, define_kernel

FoldRecords = Callable[[int, Any, Any], Arrays | None]
"""Maps the size of a mapped axis, a tuple of records and one of the axes of their arrays to results, as `FoldRule`."""


def define_record_kernel(
    name: str, backends: dict[str, Kernel], fold: FoldRecords, shapes: Kernel
) -> Callable[..., Arrays]:
    """Makes a primitive of a kernel that takes records, pytrees whose static fields are hashable.

    The leaves are the operands of the primitive and the tree is its parameter `records`; which optional arrays are
    present is a part of the tree.

    Args:
        name: As in `define_kernel`, as all arguments.
        backends: The kernel for each platform; takes records.
        fold: Rule for `vmap`.
        shapes: Takes records.

    Returns:
        A function of records that returns a tuple of arrays.
    """

    def fold_leaves(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        tree = parameters["records"]
        return fold(size, tree.unflatten(arrays), tree.unflatten(axes))

    own = {platform: _of_leaves(kernel) for platform, kernel in backends.items()}
    kernel = define_kernel(name, own, fold_leaves, _of_leaves(shapes))

    def call(*records: Any) -> Arrays:
        leaves, tree = jax.tree.flatten(records)
        return kernel(*leaves, records=tree)

    return call


def _of_leaves(function: Kernel) -> Kernel:
    """Returns a function of records as one of their leaves and of the tree."""

    @functools.wraps(function)
    def of_leaves(*leaves: Any, records: Any) -> Arrays:
        return function(*records.unflatten(leaves))

    return of_leaves
