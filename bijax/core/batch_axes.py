"""The batch axes of arguments, as `jax.vmap` takes them in `in_axes`."""

from collections.abc import Sequence
from typing import Any

import jax


def per_argument(args: tuple[Any, ...], batch_axes: Any) -> Sequence[Any]:
    """Returns the batch axes of each positional argument.

    Args:
        args: The arguments.
        batch_axes: An int or None for all of them, or a tuple with one entry for each.

    Raises:
        TypeError: If it is something else.
        ValueError: If it has another number of entries.
    """
    if batch_axes is None or (isinstance(batch_axes, int) and not isinstance(batch_axes, bool)):
        return [batch_axes] * len(args)
    if not isinstance(batch_axes, tuple | list):
        raise TypeError(
            "batch_axes: expected an int, None, or a tuple with one entry (int, None or a pytree of them) per "
            f"argument, as in jax.vmap's in_axes; got {batch_axes!r}."
        )
    if len(batch_axes) != len(args):
        raise ValueError(
            f"batch_axes: expected one entry per argument, {len(args)}; got {len(batch_axes)}: {batch_axes!r}. "
            "Mark arguments without rows, such as weights, with None."
        )
    return batch_axes


def per_leaf(axes: Any, tree: Any, name: str, of: str) -> list[int | None]:
    """Returns the batch axis of each leaf of an argument; leaves that are None count.

    Args:
        axes: An int, None or a pytree of them that is a prefix of the argument.
        tree: The argument.
        name: Name of the axes, for the message.
        of: Name of the argument, for the message.

    Raises:
        TypeError: If an axis is neither an int nor None.
        ValueError: If the axes are no prefix of the argument.
    """
    try:
        flat = jax.tree_util.tree_leaves(jax.tree.broadcast(axes, tree, is_leaf=_is_none), is_leaf=_is_none)
    except ValueError as error:
        raise ValueError(
            f"{name}: expected an int, None or a pytree of them that is a prefix of {of}; got {axes!r} for "
            f"{jax.tree_util.tree_structure(tree)}."
        ) from error
    for axis in flat:
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise TypeError(f"{name}: expected ints and None; got {axis!r} of type {type(axis).__name__}.")
    return flat


def different_counts(counts: Sequence[tuple[str, int]], args: Sequence[str], batch_axes: Any) -> str:
    """Returns the message for arrays whose numbers of rows differ.

    Args:
        counts: Name and number of rows of each batched array.
        args: The name of the argument of each of them.
        batch_axes: The value passed.
    """
    first: dict[int, str] = {}
    for name, count in counts:
        first.setdefault(count, name)
    some = ", ".join(f"{name} has {count} rows" for count, name in list(first.items())[:4])
    more = f" and {len(first) - 4} other numbers" if len(first) > 4 else ""
    single = [a for a in dict.fromkeys(args) if len({c for (_, c), b in zip(counts, args, strict=True) if a == b}) == 1]
    guess = tuple(0 if a in single and len(dict.fromkeys(args)) > 1 else None for a in dict.fromkeys(args))
    advice = f" (batch_axes={guess}?)" if 0 in guess and None in guess else ""
    return (
        f"expected the same number of rows in every batched array; got {batch_axes=}, and {some}{more}. Mark the"
        f" arguments without rows, such as weights, with None{advice}."
    )


def _is_none(x: Any) -> bool:
    return x is None
