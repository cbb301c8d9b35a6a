"""What the operations on rows share: arranging an array as rows, and kernels whose arrays have rows in front."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.core.contracts import run
from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
from pallas_kernels.contract import PTX_FUNCTIONS, XLA_FUNCTIONS
from pallas_kernels.parts.served import Served


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


@dataclasses.dataclass(frozen=True)
class Orders:
    """The contracts of a row operation.

    Attributes:
        portable: The contract of the portable form, for rows of so many columns; None if nothing is summed.
        hopper: That of the kernel for Hopper GPUs, where it is another one.
        functions: Whether exp and log, or other code of single elements, fix bits; then kernels get `functions` too.
    """

    portable: Callable[[int], Any] | None = None
    hopper: Callable[[int], Any] | None = None
    functions: bool = False

    def options(self, columns: int, on_hopper: bool) -> dict[str, Any]:
        """Returns the contracts as the options of a kernel."""
        options: dict[str, Any] = {}
        if chosen := (self.hopper or self.portable) if on_hopper else self.portable:
            options["contract"] = chosen(columns)
        if self.functions:
            options["functions"] = PTX_FUNCTIONS if on_hopper else XLA_FUNCTIONS
        return options


def row_backends(
    portable: Callable[..., Any], hopper: Callable[[], Callable[..., Any]] | None, orders: Orders
) -> dict[str, Kernel]:
    """Returns the table of backends of a row operation: its kernel for Hopper GPUs, the portable form elsewhere.

    Args:
        portable: Takes arrays and hashable parameters; returns an array or a tuple of arrays.
        hopper: Returns a function of the same arguments with the same results, for GPUs of that architecture; None if
            there is none.
        orders: The contracts, which the functions get by the name of `contract` and `functions`.

    Returns:
        For each platform a function of arrays, with their names in `names` if the kernels take them by name.
    """

    def on_cuda(*arrays: jax.Array, names: tuple[str, ...] = (), **parameters: Any) -> Arrays:
        by_name: dict[str, Any] = dict(zip(names, arrays, strict=True)) if names else {}
        if hopper is None or cuda_architecture() != HOPPER:
            return anywhere(*arrays, names=names, **parameters)
        kernel, given = hopper(), () if names else arrays
        options = {**by_name, **orders.options(_columns(arrays), on_hopper=True), **parameters}
        if isinstance(kernel, Served) and not kernel.serves(*given, **options):
            return anywhere(*arrays, names=names, **parameters)
        like = functools.partial(_as_portable, portable, orders, _columns(arrays))
        return as_tuple(run(kernel, *given, like=like, **options))

    def anywhere(*arrays: jax.Array, names: tuple[str, ...] = (), **parameters: Any) -> Arrays:
        by_name: dict[str, Any] = dict(zip(names, arrays, strict=True)) if names else {}
        options = orders.options(_columns(arrays), on_hopper=False)
        return as_tuple(run(portable, *(() if names else arrays), **by_name, **options, **parameters))

    # The last one is traced for the shapes of the results.
    return {"cuda": on_cuda, "cpu": anywhere}


def _columns(arrays: Sequence[jax.Array]) -> int:
    """Returns the length of a row."""
    return arrays[0].shape[1] if arrays[0].ndim > 1 else 1


def _as_portable(portable: Callable[..., Any], orders: Orders, columns: int, *arrays: jax.Array, **options: Any) -> Any:
    return portable(*arrays, **{**options, **orders.options(columns, on_hopper=False)})


def as_tuple(results: Any) -> Arrays:
    """Returns the results of a kernel, which may be one array, as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def define_row_kernel(
    name: str,
    kernel: Callable[..., Any],
    hopper: Callable[[], Callable[..., Any]] | None = None,
    *,
    orders: Orders,
    folds: bool = True,
) -> Callable[..., Arrays]:
    """Makes a primitive of a kernel that computes every row on its own.

    Args:
        name: Name of the primitive; it gets the prefix `bijax_`.
        kernel: Takes arrays and hashable parameters by name; returns an array or a tuple of arrays, all with rows in
            front. Arguments with two and more dimensions have rows in front, those with one are shared by all rows.
        hopper: Returns a function of the same arguments with the same results, for Hopper GPUs.
        orders: The contracts, which both get by the name of `contract` and `functions`.
        folds: Whether all arguments with two and more dimensions have the same rows, so that `vmap` adds more of them.

    Returns:
        A function of a dict of arrays by name, in which None stands for an argument that is left out, and keyword
        parameters. It returns a tuple of arrays.
    """

    def fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        dims = [a.ndim - (d is not None) for a, d in zip(arrays, axes, strict=True)]
        if any(n == 1 and d is not None for n, d in zip(dims, axes, strict=True)):
            return None
        folded = (a if n == 1 else fold_rows(size, (a,), (d,))[0] for a, d, n in zip(arrays, axes, dims, strict=True))
        return unfold_rows(size, primitive(*folded, **parameters))

    primitive = define_kernel(name, row_backends(kernel, hopper, orders), fold if folds else None)

    def call(arrays: dict[str, jax.Array | None], **parameters: Any) -> Arrays:
        given = {n: a for n, a in arrays.items() if a is not None}
        return primitive(*given.values(), names=tuple(given), **parameters)

    return call
