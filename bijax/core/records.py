"""Kernels of records: a primitive binds the leaves, and the tree maps them to arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bijax.core.primitive import Arrays, Backend, Kernel, define_kernel
from bijax.core.record_tree import RecordTree
from pallas_kernels.target import Target

FoldRecords = Callable[[int, Any, Any], Arrays | None]
"""Maps the size of a mapped axis, a tuple of records and one of the axes of their arrays to results; see `FoldRule`."""


def define_record_kernel(name: str, backend: Backend, fold: FoldRecords, shapes: Kernel) -> Callable[..., Arrays]:
    """Makes a primitive of a kernel that takes records, pytrees whose static fields are hashable.

    The leaves are the operands of the primitive and the tree is its parameter `tree`; which optional arrays are
    present is a part of the tree.

    Args:
        name: As in `define_kernel`, like all arguments.
        backend: Takes the target and records.
        fold: Rule for `vmap`.
        shapes: Takes records.

    Returns:
        A function of records that returns a tuple of arrays.
    """

    def fold_leaves(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        tree: RecordTree = parameters["tree"]
        return fold(size, tree.records(arrays), tree.records(axes))

    @functools.wraps(backend)
    def own(target: Target, *leaves: Any, tree: RecordTree) -> Arrays:
        return backend(target, *tree.records(leaves))

    def like(*leaves: Any, tree: RecordTree) -> Arrays:
        return shapes(*tree.records(leaves))

    kernel = define_kernel(name, own, fold_leaves, like)

    def call(*records: Any) -> Arrays:
        leaves, tree = jax.tree.flatten(records)
        return kernel(*leaves, tree=RecordTree(tree))

    return call
