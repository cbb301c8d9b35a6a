"""Shared code of the row operations: arranging an array as rows, and kernels whose arrays have leading row axes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bijax.core.primitive import Arrays, Backend, Kernel, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import as_tuple, run_kernel
from pallas_kernels.target import Target


def as_rows(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Arranges an array as rows.

    Args:
        x: Array of any shape.
        axes: Axes that make up a row, ascending.

    Returns:
        (M, C), and a function that restores the shape of `x` for a result of that shape.
    """
    kept = tuple(a for a in range(x.ndim) if a not in axes)
    order = (*kept, *axes)
    moved = x.transpose(order)
    inverse = tuple(order.index(a) for a in range(x.ndim))

    def back(rows: jax.Array) -> jax.Array:
        return rows.reshape(moved.shape).transpose(inverse)

    return moved.reshape(math.prod(x.shape[a] for a in kept), math.prod(x.shape[a] for a in axes)), back


def row_backend(operation: str, like: Kernel | None = None) -> Backend:
    """Returns the backend of a row operation, whose contracts are chosen by the number of columns.

    Args:
        operation: Name of the operation in the registry. Its kernels take arrays and hashable parameters, and return an
            array or a tuple of arrays.
        like: A function of the same arrays and parameters, but for the contract, whose results have the same shapes and
            dtypes and which is cheap to trace; by default the CPU kernel.

    Returns:
        A function of a target and arrays, with their names in `names` if the kernels take them by name.
    """

    def run_rows(target: Target, *arrays: jax.Array, names: tuple[str, ...] = (), **parameters: Any) -> Arrays:
        columns = arrays[0].shape[1] if arrays[0].ndim > 1 else 1
        by_name: dict[str, Any] = dict(zip(names, arrays, strict=True)) if names else {}
        shapes = like or functools.partial(run_kernel, operation, Target("cpu"), columns)
        given = () if names else arrays
        return as_tuple(run_kernel(operation, target, columns, *given, like=shapes, **by_name, **parameters))

    return run_rows


def define_row_kernel(
    name: str,
    operation: str | None = None,
    *,
    folds: bool = True,
    like: Kernel | None = None,
    backend: Backend | None = None,
) -> Callable[..., Arrays]:
    """Makes a primitive of an operation that computes each row independently.

    Args:
        name: Name of the primitive; it gets the prefix `bijax_`.
        operation: Name of the operation in the registry, if it differs; see `row_backend`. Its kernels take arrays by
            name: those with two or more dimensions have rows in front, those with one are shared by all rows.
        folds: Whether all arguments with two or more dimensions have the same rows, so that `vmap` adds more of them.
        like: As for `row_backend`: a function of arrays by name and of the parameters.
        backend: Used instead of `row_backend` of the operation.

    Returns:
        A function of a dict of arrays by name, with None for an omitted argument, and keyword
        parameters. It returns a tuple of arrays.
    """

    def fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        dims = [a.ndim - (d is not None) for a, d in zip(arrays, axes, strict=True)]
        if any(n == 1 and d is not None for n, d in zip(dims, axes, strict=True)):
            return None
        folded = (a if n == 1 else fold_rows(size, (a,), (d,))[0] for a, d, n in zip(arrays, axes, dims, strict=True))
        return unfold_rows(size, primitive(*folded, **parameters))

    def shapes(*arrays: jax.Array, names: tuple[str, ...], **parameters: Any) -> Arrays:
        return like(**dict(zip(names, arrays, strict=True)), **parameters) if like else ()

    backend = backend or row_backend(operation or name, like)
    primitive = define_kernel(name, backend, fold if folds else None, shapes if like else None)

    def call(arrays: dict[str, jax.Array | None], **parameters: Any) -> Arrays:
        given = {n: a for n, a in arrays.items() if a is not None}
        return primitive(*given.values(), names=tuple(given), **parameters)

    return call
