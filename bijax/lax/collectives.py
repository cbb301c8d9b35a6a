"""Sums over devices as a fixed binary tree.

Libraries add the terms of an all-reduce in an order that depends on the message size and the topology. Here the terms
are moved, which computes nothing, and each element is added as a binary tree over the devices (`TreeContract`). How
they are moved is a schedule: to all devices if the array is small, and otherwise a part to each. Two terms in float32
have one sum in either order, so on GPUs two devices use XLA's all-reduce and reduce-scatter, or for large arrays one
kernel that moves, adds and rounds where the GPUs reach each other's memory (`bijax.dispatch.peers`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.contracts import is_recording
from bijax.core.tag import kernel_code
from bijax.dispatch.peers import PeerSum, may_sum, on_peers
from bijax.dispatch.trees import tree_kernel
from bijax.lax.reduce import reduce_sum
from pallas_kernels.parts.xla.manual_axes import varying_axes

Groups = Sequence[Sequence[int]] | None

_GATHERED_ELEMENTS: Final = 1 << 19
"""Of all terms together: up to here one message to all devices is cheaper than two rounds of parts."""
_KERNEL_ELEMENTS: Final = 1 << 21
"""Of an array of two devices: from here one kernel is faster than XLA's all-reduce and a rounding."""


def why_refused(devices: int) -> str:
    """Returns why a sum over a number of devices has no fixed tree, empty if it has."""
    if devices & (devices - 1):
        return (
            f"its terms are added as a binary tree, so the number of devices must be a power of two, got {devices};"
            " use a mesh whose axis has 1, 2, 4, 8, ... devices"
        )
    return ""


def psum(
    x: jax.Array, *, axes: tuple[Any, ...], axis_index_groups: Groups = None, out_dtype: Any = None, to: str = "varying"
) -> jax.Array:
    """Adds `x` over named axes of devices, with the parameters of the primitive `psum`.

    Args:
        x: Array of any shape and floating or complex dtype; float16 and bfloat16 are added in float32, complex numbers
            by parts.
        axes: Names of axes; integers among them are dimensions of `x`, over which is added first.
        axis_index_groups: Groups of devices that add among themselves.
        out_dtype: Dtype of the result, that of `x` by default.
        to: Type of the result over the axes, as in `jax.lax.all_gather`: "varying", or "invarying" where
            `jax.shard_map` should know that all devices have the same.

    Returns:
        Array of the shape of `x`, without the dimensions among the axes, rounded once to its dtype.

    Raises:
        ValueError: If the number of devices is not a power of two.

    Guarantee: each element is the sum over the devices as a fixed binary tree, whatever the shape.
    """
    if jnp.iscomplexobj(x):
        add = functools.partial(
            psum, axes=axes, axis_index_groups=axis_index_groups, out_dtype=_of_parts(out_dtype), to=to
        )
        return lax.complex(add(x.real), add(x.imag))
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    dimensions = tuple(a for a in axes if isinstance(a, int))
    if dimensions:
        x = reduce_sum(x, axes=dimensions)
    axes = tuple(a for a in axes if not isinstance(a, int))
    if not axes:
        return x.astype(dtype)
    n = _devices(axes, axis_index_groups)
    if why := why_refused(n):
        raise ValueError(f"the sum over the devices of {axes}: {why}.")
    exchange = functools.partial(_exchange, axes=axes, groups=axis_index_groups, n=n, dtype=dtype, to=to)
    if axis_index_groups is not None or x.dtype != jnp.float32 or n != 2:
        return exchange(x)
    add = functools.partial(_all_reduce, axes=axes, dtype=dtype, to=to)
    if _by_kernel(x, axes):
        add = functools.partial(_on_peers, kernel=PeerSum(axes[0], n, dtype, True, x.shape, _add_parts), to=to)
    return lax.platform_dependent(x, cuda=add, default=exchange)


def _by_kernel(x: jax.Array, axes: tuple[Any, ...]) -> bool:
    return x.size >= _KERNEL_ELEMENTS and not is_recording() and may_sum(x, axes, 2)


def _on_peers(x: jax.Array, *, kernel: PeerSum, to: str = "varying") -> jax.Array:
    """Adds an array, or its parts (devices, ...) of which each device keeps its own, by one kernel."""
    return on_peers(kernel, x.reshape(kernel.devices, -1), to=to).reshape(x.shape if kernel.whole else x.shape[1:])


def _add_parts(parts: jax.Array, axis: Any, dtype: str, shape: tuple[int, ...]) -> jax.Array:
    return _all_reduce(parts.reshape(shape), axes=(axis,), dtype=dtype, to="varying").reshape(parts.shape)


def _exchange(x: jax.Array, *, axes: tuple[Any, ...], groups: Groups, n: int, dtype: str, to: str) -> jax.Array:
    """Moves the terms, and adds them where they arrive."""
    options: dict[str, Any] = {"axis_index_groups": groups}
    if n == 1 or n * x.size <= _GATHERED_ELEMENTS:
        return tree_kernel(lax.all_gather(x, axes, axis=0, to=to, **options), out_dtype=dtype)[0]
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
    terms = lax.all_to_all(flat, axes, split_axis=0, concat_axis=0, tiled=True, **options)
    (part,) = tree_kernel(terms, out_dtype=dtype)
    whole: jax.Array = lax.all_gather(part, axes, axis=0, tiled=True, to=to, **options)
    return whole[: x.size].reshape(x.shape)


def _all_reduce(x: jax.Array, *, axes: tuple[Any, ...], dtype: str, to: str) -> jax.Array:
    """Adds the terms of two devices by XLA's all-reduce; the kernel of the tree rounds the sum.

    XLA adds operands of all-reduces first where it then adds their results; the barrier hides the results from it.
    """
    with kernel_code():
        total = lax.optimization_barrier(lax.psum(x, axes))
    missing = tuple(a for a in axes if a not in varying_axes(jax.typeof(total))) if to == "varying" else ()
    if missing and varying_axes(jax.typeof(x)):
        total = lax.pcast(total, missing, to="varying")
    return tree_kernel(total[None], out_dtype=dtype)[0]


def reduce_scatter(
    x: jax.Array,
    *,
    scatter_dimension: int,
    axis_name: Any,
    axis_index_groups: Groups = None,
    axis_size: int,
    tiled: bool,
    out_dtype: Any = None,
) -> jax.Array:
    """Adds `x` over a named axis and keeps this device's part, with the parameters of the primitive `reduce_scatter`.

    Raises:
        ValueError: If the number of devices is not a power of two.

    Guarantee: each element is the sum over the devices as a fixed binary tree, whatever the shape.
    """
    if why := why_refused(axis_size):
        raise ValueError(f"the sum over the devices of {axis_name!r}: {why}.")
    if jnp.iscomplexobj(x):
        add = functools.partial(
            reduce_scatter,
            scatter_dimension=scatter_dimension,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            axis_size=axis_size,
            tiled=tiled,
            out_dtype=_of_parts(out_dtype),
        )
        return lax.complex(add(x.real), add(x.imag))
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    parts = jnp.moveaxis(x, scatter_dimension, 0)
    parts = parts.reshape(axis_size, parts.shape[0] // axis_size, *parts.shape[1:])
    exchange = functools.partial(_exchange_parts, axis=axis_name, groups=axis_index_groups, dtype=dtype)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_index_groups is not None or x.dtype != jnp.float32 or axis_size != 2:
        mine = exchange(parts)
    else:
        scatter = functools.partial(_scatter, axis=axis_name, dtype=dtype)
        if _by_kernel(parts, axes):
            kernel = PeerSum(axes[0], axis_size, dtype, False, parts.shape, _add_own_part)
            scatter = functools.partial(_on_peers, kernel=kernel)
        mine = lax.platform_dependent(parts, cuda=scatter, default=exchange)
    return (
        jnp.moveaxis(mine, 0, scatter_dimension)
        if tiled
        else mine.reshape(tuple(s for i, s in enumerate(x.shape) if i != scatter_dimension))
    )


def _exchange_parts(parts: jax.Array, *, axis: Any, groups: Groups, dtype: str) -> jax.Array:
    """Moves the terms of this device's part, and adds them."""
    terms = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=groups)
    (mine,) = tree_kernel(terms, out_dtype=dtype)
    return mine


def _scatter(parts: jax.Array, *, axis: Any, dtype: str) -> jax.Array:
    """Adds the terms of two devices by XLA's reduce-scatter; the kernel of the tree rounds the sum."""
    with kernel_code():
        total = lax.optimization_barrier(lax.psum_scatter(parts, axis))
    return tree_kernel(total[None], out_dtype=dtype)[0]


def _add_own_part(parts: jax.Array, axis: Any, dtype: str, shape: tuple[int, ...]) -> jax.Array:
    return _scatter(parts.reshape(shape), axis=axis, dtype=dtype).reshape(-1)


def _of_parts(dtype: Any) -> Any:
    """Returns the dtype of the real and imaginary parts of a complex dtype."""
    return None if dtype is None else np.finfo(dtype).dtype


def _devices(axes: tuple[Any, ...], groups: Groups) -> int:
    return len(groups[0]) if groups else math.prod(lax.axis_size(a) for a in axes)
