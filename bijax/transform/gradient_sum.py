"""The sums over the units of a batch, and whether a micro-batch may be added to them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bijax.transform.invariant import invariant

PyTree = Any
Leaf = tuple[str, tuple[int, ...], jnp.dtype]
"""The path, the shape and the dtype of a result."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The sums over the units added so far; a pytree, for `jit`, `scan`, donation and checkpoints.

    Attributes:
        value: Sum of the units' losses, float32 (float64 for float64).
        aux: Sums of the units' auxiliary outputs, integers in at least 32 bits; None without any.
        grads: Sums of the units' gradients, float32 (float64 for float64).
        units: Number of units added, int32.
        dtypes: The dtypes of the results: as of `jax.value_and_grad`, but as of the sums for integers and bools.
        reduction: What the loss function does over its examples, "mean" or "sum".
        has_aux: Whether there are auxiliary outputs.
        unit: Number of examples in a unit.
    """

    value: jax.Array
    aux: PyTree
    grads: PyTree
    units: jax.Array
    dtypes: tuple[jnp.dtype, ...] = dataclasses.field(metadata={"static": True})
    reduction: str = dataclasses.field(metadata={"static": True})
    has_aux: bool = dataclasses.field(metadata={"static": True})
    unit: int = dataclasses.field(metadata={"static": True})

    def value_and_grad(self) -> tuple[Any, PyTree]:
        """Returns what `jax.value_and_grad` would return for all examples added, in its dtypes.

        Returns:
            The loss, or the pair of the loss and the auxiliary outputs, and the gradients. Each is rounded once to its
            dtype; integers and bools come as sums, in at least int32 or uint32. All are nan for a mean without
            examples.
        """
        sums = ((self.value, self.aux), self.grads)

        @invariant
        def finish(sums: PyTree, units: jax.Array) -> PyTree:
            leaves, tree = jax.tree.flatten(sums)
            if self.reduction == "mean":
                leaves = [x / units.astype(x.dtype) for x in leaves]
            return jax.tree.unflatten(tree, [x.astype(d) for x, d in zip(leaves, self.dtypes, strict=True)])

        (value, aux), grads = finish(sums, self.units)
        return ((value, aux) if self.has_aux else value), grads


def check_is_sum(total: Any, reduction: str, has_aux: bool, unit: int) -> None:
    """Checks that a sum was started as the units that are to be added are.

    Means over units of different numbers of examples have no mean that can be computed from their sum.

    Raises:
        TypeError: If it is not a `GradientSum`.
        ValueError: If it was started otherwise.
    """
    if not isinstance(total, GradientSum):
        raise TypeError(
            f"accumulate_gradients: expected a GradientSum to add to, got {type(total).__name__}; begin with start()."
        )
    for name, wanted in (("unit", unit), ("reduction", reduction), ("has_aux", has_aux)):
        given = getattr(total, name)
        if given != wanted:
            raise ValueError(
                f"accumulate_gradients: expected a sum with {name}={wanted!r}, got one with {name}={given!r}; add to a"
                " sum that was started with the same options."
            )


def check_has_shapes(total: GradientSum, found: PyTree, dtypes: tuple[jnp.dtype, ...]) -> None:
    """Checks that the results of a unit can be added to a sum.

    Args:
        total: The sum.
        found: The loss, auxiliary outputs and gradients of a unit.
        dtypes: Of the results that would be returned for it.

    Raises:
        ValueError: If they have other shapes or dtypes.
    """
    kept, new = _leaves((total.value, total.aux, total.grads), total.dtypes), _leaves(found, dtypes)
    if kept != new:
        ours = next((x for x in kept if x not in new), None)
        theirs = next((x for x in new if x not in kept), None)
        raise ValueError(
            f"accumulate_gradients: expected results of the shapes and dtypes of the sum, {_shown(ours)}, got"
            f" {_shown(theirs)}; start a new sum for other parameters."
        )


def _leaves(tree: PyTree, dtypes: tuple[jnp.dtype, ...]) -> list[Leaf]:
    leaves = zip(jax.tree_util.tree_leaves_with_path(tree), dtypes, strict=True)
    return [(jax.tree_util.keystr(path), x.shape, dtype) for (path, x), dtype in leaves]


def _shown(leaf: Leaf | None) -> str:
    if leaf is None:
        return "nothing in its place"
    path, shape, dtype = leaf
    for place, name in (("[0]", "loss"), ("[1]", "aux"), ("[2]", "gradient")):
        path = f"{name}{path.removeprefix(place)}" if path.startswith(place) else path
    return f"{path} of {dtype}{list(shape)}"
