"""Mesh axes that an operation is cut over: their size, and the leaves of a sum that a device has."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from bijax.core.checks import integer
from bijax.lax.collectives import why_refused
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.manual_axes import varying_axes

Axis = str | tuple[str, ...] | None
"""Names of mesh axes; None for one device."""


def names_of(axis: Axis) -> tuple[str, ...]:
    """Returns the names of the axes; none for one device."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def size_of(op: str, axis: Any) -> int:
    """Returns the number of devices along an axis; 1 for None.

    Raises:
        TypeError: If `axis` is neither a name, a tuple of names nor None.
        ValueError: If the axis is unknown here.
    """
    if not (
        axis is None or isinstance(axis, str) or (isinstance(axis, tuple) and all(isinstance(a, str) for a in axis))
    ):
        raise TypeError(f"{op}: axis must be a name of a mesh axis, a tuple of names, or None, got {axis!r}.")
    try:
        return math.prod(lax.axis_size(name) for name in names_of(axis))
    except NameError as error:
        raise ValueError(
            f"{op}: axis must be an axis of a mesh that jax.shard_map maps over here, got {axis!r}; call it inside"
            " jax.shard_map, or pass axis=None on one device."
        ) from error


def devices_of(op: str, axis: Any) -> int:
    """Returns the number of devices along an axis, as `size_of`, for a sum over them.

    Raises:
        TypeError: As `size_of`.
        ValueError: As `size_of`, and if the number is not a power of two.
    """
    count = size_of(op, axis)
    if why := why_refused(count):
        raise ValueError(f"{op}: the sum over the devices of axis {axis!r}: {why}.")
    return count


def leaves_of(op: str, axis: Any, leaves: Any) -> int:
    """Returns the number of leaves of a sum that each device has.

    Raises:
        TypeError: If `leaves` is not an integer.
        ValueError: As `devices_of`, and if `leaves` is not a power of two, or there are more devices than leaves.
    """
    leaves, count = integer(op, "leaves", leaves), devices_of(op, axis)
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"{op}: leaves must be a power of two, got {leaves}.")
    if count > leaves:
        raise ValueError(
            f"{op}: a device needs at least one leaf of the sum, got {leaves} leaves for the {count} devices of axis"
            f" {axis!r}; use at most {leaves} devices. More leaves are another contract, with different bits, on one"
            " device too."
        )
    return leaves // count


def vary_over_others[T](axis: Axis, arrays: Sequence[T]) -> list[T]:
    """Returns the arrays cast to vary over the same mesh axes, except those of `axis`; None is unchanged."""
    types = [varying_axes(jax.typeof(x)) for x in arrays if x is not None]
    wanted = frozenset().union(*types) - {*names_of(axis)}

    def cast(x: Any) -> Any:
        missing = () if x is None else tuple(sorted(wanted - varying_axes(jax.typeof(x))))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in arrays]


def vary_over(axis: Axis, x: jax.Array) -> jax.Array:
    """Returns an array cast to vary over the axes, if `jax.shard_map` records that."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return x
    missing = tuple(name for name in names_of(axis) if name not in varying_axes(jax.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def check_differentiable(op: str, axis: Axis) -> None:
    """Checks, where an operation is differentiated, that `jax.shard_map` records which arrays are equal on all devices.

    Without it, `jax.shard_map` divides cotangents by the number of devices, and expects every sum over devices in the
    backward pass.

    Raises:
        UnsupportedError: If it does not.
    """
    if axis is not None and not varying_axes(jax.typeof(lax.axis_index(names_of(axis)))):
        raise UnsupportedError(
            f"{op}: expected a gradient inside jax.shard_map with check_vma=True, its default, got check_vma=False,"
            " with which gradients would be wrong by a factor of the number of devices."
        )


def check_equal_on_all(op: str, name: str, x: jax.Array, axis: Axis, instead: str) -> None:
    """Checks that the type of an array says that all devices of the axes have the same.

    Raises:
        ValueError: If it varies over one of them.
    """
    varying = sorted(varying_axes(jax.typeof(x)) & {*names_of(axis)})
    if varying:
        raise ValueError(
            f"{op}: {name} must be the same on all devices of axis {axis!r}, got an array that varies over"
            f" {', '.join(varying)}; {instead}."
        )
