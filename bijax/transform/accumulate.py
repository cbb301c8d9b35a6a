"""Gradients of a batch that do not depend on the split into micro-batches.

A sum over a batch has an order, and summing each micro-batch separately changes that order. Here the gradient of a
batch is *defined* as a chain over units of a fixed number of examples: every unit is computed by one program of one
shape, and units are added in ascending order. Pausing the chain between two units and resuming it changes nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.checks import check_callable, flag
from bijax.core.explicit_axes import gathered
from bijax.transform.gradient_sum import GradientSum, check_has_shapes, check_is_sum
from bijax.transform.invariant import invariant
from pallas_kernels.parts.xla.manual_axes import vary_as
from pallas_kernels.runtime.own_settings import own_tracing

PyTree = Any


class GradientAccumulation:
    """A loss function's gradient as a chain over units; made by `accumulate_gradients`, which documents its use."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        *,
        unit: int,
        argnums: int | Sequence[int],
        batch_argnums: int | Sequence[int] | None,
        has_aux: bool,
        reduction: str,
    ) -> None:
        self._argnums = _indices("argnums", argnums)
        self._has_aux = flag("accumulate_gradients", "has_aux", has_aux)
        self._gradient = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=self._has_aux)
        self._unit, self._reduction = unit, reduction
        self._batch_argnums = None if batch_argnums is None else _indices("batch_argnums", batch_argnums)
        if both := set(self._argnums) & set(self._batch_argnums or ()):
            raise ValueError(
                f"accumulate_gradients: expected arguments with examples other than those that are differentiated, got"
                f" {both} in both argnums and batch_argnums; a gradient for each example is no sum over the batch."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        """Returns the loss and the gradients of a whole batch, like `jax.value_and_grad`."""
        return self.add(self.start(*args, **kwargs), *args, **kwargs).value_and_grad()

    def start(self, *args: Any, **kwargs: Any) -> GradientSum:
        """Returns the sum over no units.

        Args:
            *args: Arguments of the loss function. For those with examples, only shapes and dtypes are used.
            **kwargs: Its keyword arguments.
        """
        _, slices = self._cut(args)
        first = [jax.tree.map(lambda x: x[0], part) for part in slices]
        result = invariant(lambda: self._one_unit(args, first, kwargs))
        value, aux, grads = jax.eval_shape(result)
        _check_aux(aux, self._reduction)
        dtypes = tuple(_result(x.dtype) for x in jax.tree.leaves(((value, aux), grads)))
        zeros = jax.tree.map(lambda x: vary_as(jnp.zeros(x.shape, _wide(x.dtype)), x), (value, aux, grads))
        value, aux, grads = zeros
        return GradientSum(value, aux, grads, jnp.zeros((), jnp.int32), dtypes, *self._kind)

    def add(self, total: GradientSum, *args: Any, **kwargs: Any) -> GradientSum:
        """Adds a micro-batch.

        Args:
            total: The previous sum; `start` returns the initial one.
            *args: Arguments of the loss function, with any number of whole units in those with examples.
            **kwargs: Its keyword arguments.

        Returns:
            A new sum; `total` may be donated.

        Raises:
            TypeError: If `total` is not a `GradientSum`.
            ValueError: If it has other units, another reduction, or parameters or outputs of other shapes or dtypes.
        """
        check_is_sum(total, *self._kind)
        units, slices = self._cut(args)

        def add_unit(sums: PyTree, unit: list[PyTree]) -> tuple[PyTree, None]:
            found = lax.platform_dependent(
                self._one_unit(args, unit, kwargs), cuda=lambda x: x, default=_apart_from_additions
            )
            check_has_shapes(total, found, tuple(_result(x.dtype) for x in jax.tree.leaves(found)))
            return jax.tree.map(lambda s, x: s + gathered(x).astype(s.dtype), sums, found), None

        sums = (total.value, total.aux, total.grads)
        (value, aux, grads), _ = invariant(lambda sums, slices: lax.scan(add_unit, sums, slices))(sums, slices)
        return dataclasses.replace(total, value=value, aux=aux, grads=grads, units=total.units + units)

    @property
    def _kind(self) -> tuple[str, bool, int]:
        """What sums must have in common to be one sum."""
        return self._reduction, self._has_aux, self._unit

    def _one_unit(self, args: tuple[Any, ...], unit: list[PyTree], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        arguments = list(args)
        for i, part in zip(self.batched(args), unit, strict=True):
            arguments[i] = part
        value, grads = self._gradient(*arguments, **kwargs)
        value, aux = value if self._has_aux else (value, None)
        return value, aux, grads

    def batched(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns which of the positional arguments hold examples."""
        if self._batch_argnums is None:
            return tuple(i for i in range(len(args)) if i not in self._argnums)
        return self._batch_argnums

    def _cut(self, args: tuple[Any, ...]) -> tuple[int, list[PyTree]]:
        """Returns the number of units, and the arguments with examples, each leaf as (units, unit, ...)."""
        batched = self.batched(args)
        if any(i >= len(args) for i in (*self._argnums, *batched)):
            raise TypeError(
                f"accumulate_gradients: expected positional arguments up to number {max(*self._argnums, *batched)},"
                f" got {len(args)} of them; pass what is differentiated and what holds examples by position."
            )
        parts = jax.tree.map(gathered, [args[i] for i in batched])
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(parts)]
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or None in sizes:
            raise ValueError(
                "accumulate_gradients: expected one number of examples, as the first axis of every array in arguments"
                f" {batched}, got arrays of shapes {shapes}; name the arguments with examples in batch_argnums and pass"
                " others by keyword."
            )
        (examples,) = sizes
        if not examples or examples % self._unit:
            raise ValueError(
                f"accumulate_gradients: expected whole units of {self._unit} examples, got {examples} examples; a unit"
                " cut in two would be added in another order. Cut the batch at multiples of the unit, choose a unit"
                " that divides every micro-batch, or fill the last one with examples of weight zero."
            )
        units = examples // self._unit
        return units, jax.tree.map(lambda x: jnp.reshape(x, (units, self._unit, *jnp.shape(x)[1:])), parts)


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    *,
    unit: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
) -> GradientAccumulation:
    """Makes `jax.value_and_grad(loss_fn)` independent of how a batch is cut into micro-batches.

    The result is called like `jax.value_and_grad(loss_fn)`, with a whole batch; it loops over the batch unit by unit,
    so it needs the memory of one unit and two trees of gradients. Or the batch comes in parts:

        total = gradient.start(params, parts[0])
        for part in parts:
            total = gradient.add(total, params, part)
        loss, grads = total.value_and_grad()

    Any split at multiples of `unit` gives the same bits, for any model: 32 examples at once, 2 × 16 or 4 × 8. It runs
    under `bijax.invariant`; call it in a jitted function, which can include the optimizer.

    Args:
        loss_fn: A function that returns a scalar, or with `has_aux` a pair of a scalar and a pytree of arrays. Over
            its examples it must take the mean or the sum, see `reduction`.
        unit: Number of examples in a unit. It fixes the bits, so it belongs to the definition of a training run; the
            micro-batches do not. Choose the largest unit that fits on every device you will use.
        argnums: Which positional arguments to differentiate.
        batch_argnums: Which positional arguments hold examples, along the first axis of every array in them; by
            default all that are not differentiated. The others, and all keyword arguments, are passed whole.
        has_aux: Whether `loss_fn` returns auxiliary outputs too. They are summed, or averaged in a mean, like the loss
            itself. In a sum they may be integers, or bools, whose true values are counted; the results are then at
            least int32 or uint32, whatever their dtype, and wrap around like `jnp.sum`.
        reduction: What `loss_fn` does over its examples. With "mean", the total is the mean over the units, which all
            have the same number of examples. With "sum", it is the sum; use it for examples of different weights
            (counts of tokens, padding), return the sum of the weights as auxiliary output, and divide at the end.

    Returns:
        A callable with the methods `start` and `add`.

    Raises:
        ValueError: If `unit` is not positive, `reduction` is unknown, or an argument is in `argnums` and in
            `batch_argnums`. When called: If the number of examples is not a positive multiple of `unit`.
        TypeError: If `unit` or an index is not an int, or an argument is missing. When called: If an auxiliary output
            of a mean is not a floating-point number.

    A random key that is passed whole gives the same numbers to every unit. Pass one key for each example instead
    (`jax.random.split(key, examples)`), as an argument with examples.

    Guarantee: split-invariant, for cuts at multiples of `unit`; of the loss, the auxiliary outputs and the gradients.
    Sums over units are in float32 (float64 for float64), upwards, rounded once to the dtype of the result.

    Source: the project's design.

    Example:
        >>> def loss_fn(w, x, y):
        ...     return jnp.mean((x @ w - y) ** 2)
        >>> gradient = accumulate_gradients(loss_fn, unit=2)
        >>> w, x, y = jnp.ones(3), jnp.arange(24.0).reshape(8, 3), jnp.ones(8)
        >>> loss, grads = gradient(w, x, y)
        >>> total = gradient.start(w, x, y)
        >>> for part in range(0, 8, 4):
        ...     total = gradient.add(total, w, x[part : part + 4], y[part : part + 4])
        >>> bool((total.value_and_grad()[1] == grads).all())
        True
    """
    check_callable("accumulate_gradients", loss_fn)
    if isinstance(unit, bool) or not isinstance(unit, int):
        raise TypeError(f"accumulate_gradients: expected unit to be an int, a number of examples, got {unit!r}.")
    if unit < 1:
        raise ValueError(f"accumulate_gradients: expected unit to be 1 or more, got {unit}.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"accumulate_gradients: expected reduction to be 'mean' or 'sum', got {reduction!r}.")
    return GradientAccumulation(
        loss_fn, unit=unit, argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux, reduction=reduction
    )


def _apart_from_additions(found: PyTree) -> PyTree:
    """Returns a unit's gradients after a barrier.

    XLA:CPU would compile the additions into the unit's program. On a GPU, operations are fenced anyway; without the
    barrier an addition needs no separate pass over the gradients, and no memory for them.
    """
    return lax.optimization_barrier(found)


def _indices(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    indices = tuple(given) if isinstance(given, Sequence) else (given,)
    if not indices or not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise TypeError(
            f"accumulate_gradients: expected {name} to be an int or a non-empty sequence of ints, got {given!r}."
        )
    if min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"accumulate_gradients: expected {name} to be different and not negative, got {given!r}.")
    return indices


def _check_aux(aux: PyTree, reduction: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if reduction == "mean" and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"accumulate_gradients: expected floating-point auxiliary outputs, which are averaged as the loss is,"
                f" got {leaf.dtype} at aux{jax.tree_util.keystr(path)}; return a float, or use reduction='sum'."
            )


@own_tracing()
def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of sums."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        # The sum of bools counts the true ones, and narrow integers would overflow.
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        return jnp.promote_types(dtype, jnp.uint32 if unsigned else jnp.int32)
    return dtype


def _result(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of results; a count need not fit into the dtype of the counted values."""
    return dtype if jnp.issubdtype(dtype, jnp.floating) else _wide(dtype)
