"""What the operations on rows share: arranging an array as rows, and kernels whose arrays have rows in front."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bijax.ops._architecture import HOPPER, cuda_architecture
from bijax.ops._primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows


def as_rows(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Arranges an array as rows.

    Args:
        x: Array of any shape.
        axes: Axes that make up a row, ascending.

    Returns:
        (M, C), and a function that brings a result of that shape back to the shape of `x`.
    """
    kept = tuple(a for a in range(x.ndim) if a not in axes)
    order = (*kept, *axes)
    moved = x.transpose(order)
    inverse = tuple(order.index(a) for a in range(x.ndim))

    def back(rows: jax.Array) -> jax.Array:
        return rows.reshape(moved.shape).transpose(inverse)

    return moved.reshape(math.prod(x.shape[a] for a in kept), math.prod(x.shape[a] for a in axes)), back


def row_backends(portable: Callable[..., Any], hopper: Callable[..., Any] | None = None) -> dict[str, Kernel]:
    """Returns the table of backends of a row operation: its kernel for Hopper GPUs, the portable form elsewhere.

    Args:
        portable: Takes arrays and hashable parameters; returns an array or a tuple of arrays.
        hopper: The same with the same results, for GPUs of that architecture.
    """

    def on_cuda(*arrays: jax.Array, **parameters: Any) -> Arrays:
        chosen = hopper if hopper is not None and cuda_architecture() == HOPPER else portable
        return _as_tuple(chosen(*arrays, **parameters))

    def anywhere(*arrays: jax.Array, **parameters: Any) -> Arrays:
        return _as_tuple(portable(*arrays, **parameters))

    # The last one is traced for the shapes of the results.
    return {"cuda": on_cuda, "cpu": anywhere}


def _as_tuple(results: Any) -> Arrays:
    return results if isinstance(results, tuple) else (results,)


def define_row_kernel(
    name: str, kernel: Callable[..., Any], hopper: Callable[..., Any] | None = None
) -> Callable[..., Arrays]:
    """Makes a primitive of a kernel that computes every row on its own.

    Args:
        name: Name of the primitive; it gets the prefix `bijax_`.
        kernel: Takes arrays and hashable parameters by name; returns an array or a tuple of arrays, all with rows in
            front. Arguments with two and more dimensions have rows in front, those with one are shared by all rows.
        hopper: The same with the same results, for Hopper GPUs.

    Returns:
        A function of a dict of arrays by name, in which None stands for an argument that is left out, and keyword
        parameters. It returns a tuple of arrays.
    """

    def by_name(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def named(*arrays: jax.Array, names: tuple[str, ...], **parameters: Any) -> Any:
            return kernel(**dict(zip(names, arrays, strict=True)), **parameters)

        return named

    def fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        dims = [a.ndim - (d is not None) for a, d in zip(arrays, axes, strict=True)]
        if any(n == 1 and d is not None for n, d in zip(dims, axes, strict=True)):
            return None
        folded = (a if n == 1 else fold_rows(size, (a,), (d,))[0] for a, d, n in zip(arrays, axes, dims, strict=True))
        return unfold_rows(size, primitive(*folded, **parameters))

    backends = row_backends(by_name(kernel), None if hopper is None else by_name(hopper))
    primitive = define_kernel(name, backends, fold)

    def call(arrays: dict[str, jax.Array | None], **parameters: Any) -> Arrays:
        given = {n: a for n, a in arrays.items() if a is not None}
        return primitive(*given.values(), names=tuple(given), **parameters)

    return call
