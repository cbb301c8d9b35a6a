"""Taking a call apart into rows along its batch axes, and putting batches together again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.batch_axes import different_counts, per_argument, per_leaf
from bijax.testing._bits import is_float
from bijax.testing._data import neighbour_rows

_Rows = tuple[tuple[str, np.ndarray], ...]


@dataclasses.dataclass(frozen=True)
class _Batched:
    """A leaf with a batch axis: its rows (batch axis moved to the front), where the axis belongs, and its name."""

    rows: np.ndarray
    axis: int
    name: str


@dataclasses.dataclass(frozen=True)
class _Argument:
    """One positional argument, flattened; its leaves are `_Batched` or whatever the caller gave."""

    given: Any
    leaves: tuple[Any, ...]
    tree: Any

    @property
    def has_rows(self) -> bool:
        return any(isinstance(leaf, _Batched) for leaf in self.leaves)


class BatchedCall:
    """The arguments of a call, with the rows of the batched ones at hand.

    Attributes:
        rows: how many rows the caller gave.
        has_floats: whether a batched leaf is of a floating type, so that hostile neighbours can be made.
    """

    def __init__(self, args: tuple[Any, ...], batch_axes: Any):
        self._arguments = [
            _flatten_argument(f"argument {i}", arg, axes)
            for i, (arg, axes) in enumerate(zip(args, per_argument(args, batch_axes), strict=True))
        ]
        batched = [leaf for argument in self._arguments for leaf in argument.leaves if isinstance(leaf, _Batched)]
        counts = {len(leaf.rows) for leaf in batched}
        if not counts:
            raise ValueError(
                f"expected at least one argument with a batch axis; got {len(args)} arguments and {batch_axes=}. "
                "Give each batched argument the axis of its rows, as in jax.vmap's in_axes."
            )
        if len(counts) > 1:
            raise ValueError(
                different_counts(
                    [(leaf.name, len(leaf.rows)) for leaf in batched],
                    [
                        f"argument {i}"
                        for i, a in enumerate(self._arguments)
                        for x in a.leaves
                        if isinstance(x, _Batched)
                    ],
                    batch_axes,
                )
            )
        self.rows: int = counts.pop()
        if self.rows < 2:
            raise ValueError(
                "expected at least 2 rows along the batch axes, so that a row can have different neighbours; got "
                f"{self.rows}. Pass more rows; 8 or more find more."
            )
        self.has_floats: bool = any(is_float(leaf.rows.dtype) for leaf in batched)

    def batch(
        self, row_ids: np.ndarray, hostile: np.ndarray, kind: str, rng: np.random.Generator
    ) -> list[list[jax.Array]]:
        """Makes the batched leaves of one batch.

        Args:
            row_ids: the row at each position.
            hostile: bool per position: where True, floating leaves hold hostile values instead of the row's.
            kind: which hostile values, see `neighbour_rows`.
            rng: where they come from.
        """
        return [
            [_make(leaf, row_ids, hostile, kind, rng) for leaf in argument.leaves if isinstance(leaf, _Batched)]
            for argument in self._arguments
        ]

    def unbatched_arrays(self) -> list[list[Any]]:
        """Gives the arrays without a batch axis, such as weights, as the caller passed them."""
        return [[leaf for leaf in argument.leaves if _is_unbatched_array(leaf)] for argument in self._arguments]

    def arguments(self, batch: list[list[jax.Array]], unbatched: list[list[Any]] | None = None) -> list[Any]:
        """Puts the arguments of a call together.

        Args:
            batch: the result of `batch`.
            unbatched: replacements for the arrays of `unbatched_arrays`; None leaves arguments without rows as the very
                objects that the caller passed.
        """
        out = []
        for i, argument in enumerate(self._arguments):
            if unbatched is None and not argument.has_rows:
                out.append(argument.given)
                continue
            rows = iter(batch[i])
            others = iter(unbatched[i]) if unbatched is not None else None
            leaves = []
            for leaf in argument.leaves:
                if isinstance(leaf, _Batched):
                    leaves.append(next(rows))
                else:
                    leaves.append(next(others) if others is not None and _is_unbatched_array(leaf) else leaf)
            out.append(jax.tree_util.tree_unflatten(argument.tree, leaves))
        return out


def output_rows(out: Any, out_batch_axes: Any, batch_size: int) -> _Rows:
    """Gives the rows of each output with a batch axis: its path and the array with the batch axis first.

    Raises:
        ValueError: `out_batch_axes` does not fit the output, or marks no part of it.
    """
    axes = per_leaf(out_batch_axes, out, "out_batch_axes", "the output")
    found = []
    for (path, leaf), axis in zip(jax.tree_util.tree_leaves_with_path(out, is_leaf=_is_none), axes, strict=True):
        if leaf is None or axis is None:
            continue
        name = f"output{jax.tree_util.keystr(path)}"
        shape = np.shape(leaf)
        if not -len(shape) <= axis < len(shape) or shape[axis] != batch_size:
            raise ValueError(
                f"expected {name} to have {batch_size} rows along axis {axis} for a batch of {batch_size}; got shape "
                f"{shape}. Give its batch axis in out_batch_axes, or None for an output without rows, which is then "
                "not compared."
            )
        found.append((name, np.moveaxis(np.asarray(leaf), axis, 0)))
    if not found:
        raise ValueError(
            f"expected at least one output with a batch axis; got {out_batch_axes=} for the output structure "
            f"{jax.tree_util.tree_structure(out)}. Outputs marked None are not compared."
        )
    return tuple(found)


def _flatten_argument(where: str, arg: Any, axes: Any) -> _Argument:
    flat_axes = per_leaf(axes, arg, f"batch_axes for {where}", where)
    leaves, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=_is_none)
    flat = [
        leaf if axis is None or leaf is None else _split(leaf, axis, f"{where}{jax.tree_util.keystr(path)}")
        for (path, leaf), axis in zip(leaves, flat_axes, strict=True)
    ]
    return _Argument(arg, tuple(flat), tree)


def _split(leaf: Any, axis: int, where: str) -> _Batched:
    if not isinstance(leaf, np.ndarray | jax.Array):
        raise ValueError(
            f"{where}: expected a jax or NumPy array to have batch axis {axis}; got {leaf!r} of type "
            f"{type(leaf).__name__}. Mark it with None in batch_axes."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"{where}: expected an array with an axis {axis}; got {leaf.dtype}{leaf.shape}. Give the axis of its rows "
            "in batch_axes, or None if it has none."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{where}: expected numbers in a batched array; got {leaf.dtype}. Pass jax.random.key_data(keys) and wrap "
            "it inside the function."
        )
    rows = np.moveaxis(np.asarray(leaf), axis, 0)
    converted = np.asarray(jnp.asarray(rows))
    if converted.dtype != rows.dtype and not (
        np.issubdtype(rows.dtype, np.integer) and np.array_equal(converted, rows)
    ):
        raise TypeError(
            f"{where}: expected a dtype that JAX keeps; got {rows.dtype}, which becomes {converted.dtype} under the "
            "present jax_enable_x64. Convert it yourself, or enable x64."
        )
    return _Batched(converted, axis, where)


def _make(leaf: _Batched, row_ids: np.ndarray, hostile: np.ndarray, kind: str, rng: np.random.Generator) -> jax.Array:
    rows = leaf.rows[row_ids]
    if is_float(rows.dtype) and hostile.any():
        rows[hostile] = neighbour_rows(kind, rng, rows[hostile].shape, rows.dtype)
    return jnp.asarray(np.moveaxis(rows, 0, leaf.axis))


def _is_unbatched_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array)


def _is_none(x: Any) -> bool:
    return x is None
