"""Gradients of a batch that is cut over devices, which do not depend on the number of devices.

The batch is a fixed number of lanes. In a lane units are added in ascending order, as `bijax.accumulate_gradients` adds
them; lanes are added as a fixed binary tree, of which each device has a subtree.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.checks import integer
from bijax.parallel._axes import Axis, devices_of, names_of, vary_over
from bijax.parallel._sums import summed
from bijax.transform.accumulate import GradientAccumulation
from bijax.transform.accumulate import accumulate_gradients as in_one_lane
from bijax.transform.gradient_sum import GradientSum
from bijax.transform.invariant import invariant
from pallas_kernels.parts.xla.manual_axes import vary_as

PyTree = Any

_OP = "bijax.parallel.accumulate_gradients"


@dataclasses.dataclass(frozen=True)
class ParallelGradient:
    """A loss function's gradient as a tree over lanes; made by `accumulate_gradients`, which documents its use."""

    _lane: GradientAccumulation
    _unit: int
    _axis: Axis
    _lanes: int

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        """Returns the loss and the gradients of the whole batch, like `jax.value_and_grad`, on all devices.

        Args:
            *args: Arguments of the loss function: this device's part of the examples, and what all devices have.
            **kwargs: Its keyword arguments, which all devices have.

        Raises:
            ValueError: If the axis is unknown, its number of devices is not a power of two or more than `lanes`, or the
                examples of a device are not whole lanes of whole units.
        """
        devices = devices_of(_OP, self._axis)
        if devices > self._lanes:
            raise ValueError(
                f"{_OP}: each device needs at least one lane, got {self._lanes} lanes for the {devices} devices of axis"
                f" {self._axis!r}; ask for more lanes, which are another order with different bits."
            )
        if self._axis is not None:
            # Otherwise JAX would add the gradient of each unit over the devices.
            args, kwargs = jax.tree.map(lambda x: vary_over(self._axis, jnp.asarray(x)), (args, kwargs))
        batched = self._lane.batched(args)
        parts = [self._in_lanes(x, self._lanes // devices) for x in (args[i] for i in batched)]

        def lane(parts: list[PyTree]) -> GradientSum:
            given = list(args)
            for i, part in zip(batched, parts, strict=True):
                given[i] = part
            return self._lane.add(self._lane.start(*given, **kwargs), *given, **kwargs)

        total = invariant(lambda parts: _tree(lane, parts, self._lanes // devices))(parts)
        return self._over_devices(total).value_and_grad()

    def _in_lanes(self, examples: PyTree, lanes: int) -> PyTree:
        """Returns arrays of examples as (lanes, examples of a lane, ...)."""

        def cut(x: jax.Array) -> jax.Array:
            count = x.shape[0] if x.ndim else 0
            if not count or count % (lanes * self._unit):
                raise ValueError(
                    f"{_OP}: expected whole lanes of whole units of {self._unit} examples, got an array of shape"
                    f" {x.shape} for the {lanes} lanes of a device; the whole batch must have a multiple of"
                    f" {self._lanes * self._unit} examples. Fill it with examples of weight zero."
                )
            return x.reshape(lanes, count // lanes, *x.shape[1:])

        return jax.tree.map(lambda x: cut(jnp.asarray(x)), examples)

    def _over_devices(self, total: GradientSum) -> GradientSum:
        """Returns the sums over all devices."""

        def add(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.floating):
                return summed(x, self._axis, x.dtype.name)
            return x if self._axis is None else lax.psum(x, names_of(self._axis))

        value, aux, grads = jax.tree.map(add, (total.value, total.aux, total.grads))
        # All devices have equally many units, and the type must say so.
        units = lax.pmax(total.units, names_of(self._axis)) if self._axis else total.units
        devices = math.prod(lax.axis_size(name) for name in names_of(self._axis))
        return dataclasses.replace(total, value=value, aux=aux, grads=grads, units=units * devices)


def _tree(lane: Callable[[list[PyTree]], GradientSum], parts: list[PyTree], lanes: int) -> GradientSum:
    """Adds the sums of lanes as a binary tree: the program of a lane once, and one sum for each level in memory."""
    if lanes == 1:
        return lane(jax.tree.map(lambda x: x[0], parts))
    halves = jax.tree.map(lambda x: x.reshape(2, lanes // 2, *x.shape[1:]), parts)

    def half(parts: list[PyTree]) -> GradientSum:
        return _tree(lane, parts, lanes // 2)

    def add(total: tuple[jax.Array, GradientSum], part: list[PyTree]) -> tuple[tuple[jax.Array, GradientSum], None]:
        is_first, left = total
        added = jax.tree.map(lambda x, y: jnp.where(is_first, y, x + y), left, half(part))
        return (jnp.zeros_like(is_first), added), None

    shapes = jax.eval_shape(half, jax.tree.map(lambda x: x[0], halves))
    empty = jax.tree.map(lambda x: vary_as(jnp.zeros(x.shape, x.dtype), x), shapes)
    (_, total), _ = lax.scan(add, (jnp.ones((), bool), empty), halves)
    return total


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    *,
    unit: int,
    axis: Axis,
    lanes: int = 8,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
) -> ParallelGradient:
    """Makes `jax.value_and_grad(loss_fn)` independent of how a batch is cut over devices, inside `jax.shard_map`.

    The batch, in the order of the devices, is cut into `lanes` lanes of neighbouring examples. The units of a lane are
    added in ascending order, as in `bijax.accumulate_gradients`, and the lanes as a fixed binary tree. A device has
    whole lanes; it computes one unit after the other, and keeps one tree of gradients for each level of its part of the
    tree. The gradients travel in float32 and are rounded once at the end.

    With parameters that are cut over the devices (FSDP), gather them in the program around the result of this function:
    gathering adds nothing.

    Args:
        loss_fn: As for `bijax.accumulate_gradients`.
        unit: Number of examples in a unit, which is computed at once. It fixes bits.
        axis: Name of the mesh axis that the examples are cut over, or a tuple of names; None for one device.
        lanes: Number of lanes of the whole batch, a power of two: the most devices. It fixes bits.
        argnums: Which positional arguments to differentiate; all devices have them.
        batch_argnums: Which positional arguments hold examples, this device's part of them; by default all others.
        has_aux: As for `bijax.accumulate_gradients`.
        reduction: As for `bijax.accumulate_gradients`.

    Returns:
        A callable like `jax.value_and_grad(loss_fn)`, whose results are the same on all devices.

    Raises:
        TypeError: As `bijax.accumulate_gradients`, and if `lanes` is not an integer.
        ValueError: As `bijax.accumulate_gradients`, and if `lanes` is not a power of two.

    Guarantee: the loss, the auxiliary outputs and the gradients have the same bits on 1, 2, 4, ... `lanes` devices.

    Source: the project's design.

    Example:
        >>> def loss_fn(w, x, y):
        ...     return jnp.mean((x @ w - y) ** 2)
        >>> gradient = accumulate_gradients(loss_fn, unit=1, axis=None)
        >>> loss, grads = gradient(jnp.ones(3), jnp.ones((8, 3)), jnp.ones(8))
        >>> float(loss), grads.tolist()
        (4.0, [4.0, 4.0, 4.0])
    """
    lanes = integer(_OP, "lanes", lanes)
    if lanes < 1 or lanes & (lanes - 1):
        raise ValueError(f"{_OP}: lanes must be a power of two, got {lanes}.")
    lane = in_one_lane(
        loss_fn, unit=unit, argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux, reduction=reduction
    )
    return ParallelGradient(lane, unit, axis, lanes)
