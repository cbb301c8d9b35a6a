"""The flow of rows through a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax

from bijax.core.batch_axes import different_counts, per_argument, per_leaf
from bijax.transform.rows import control, elementwise, indexing, library, moves, products, reductions  # noqa: F401
from bijax.transform.rows.flow import Flow, unknown_array
from bijax.transform.rows.layout import along
from bijax.transform.rows.value import Kind, Place, Value

RowsVerdict = Literal["mixes rows", "sums rows", "rows apart"]

REASONS: Final[dict[Kind, str]] = {
    "meet": "it combines several rows",
    "sum": "it reduces over the rows",
    "position": "a value that differs from position to position of the batch, and belongs to no row, enters the row",
    "noise": "it draws numbers for all rows from one key, so those of a row follow its position; give each row a key,"
    " jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids), and draw under jax.vmap",
    "order": "rows are sorted, or read and written at computed places",
    "loop": "the number of iterations depends on several rows; under jax.vmap each row would stop by itself",
    "branch": "the branch that is taken depends on several rows",
    "routed": "rows are put into the order of their experts, or into pages, and not taken back",
    "unknown": "what it does with rows is not known",
}
"""What happens at a place, by its kind."""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A place where rows meet, or where the position of a row enters.

    Attributes:
        effect: "mixes rows" if rows of a result depend on it; "sums rows" if only results without rows do, such as a
            loss or the gradient of weights.
        primitive: Name of the JAX primitive.
        line: "FILE:LINE" of the user's program; may be empty.
        why: What happens there.
    """

    effect: RowsVerdict
    primitive: str
    line: str
    why: str


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """How the rows of a program depend on each other.

    Attributes:
        verdict: "rows apart": each row of the results depends on one row of the arguments, at any position;
            "sums rows": the same, and some results, such as a loss, are reductions over all rows; "mixes rows": a row
            depends on other rows or on its position.
        batch: Number of rows.
        meetings: The places, those that mix rows first.
    """

    verdict: RowsVerdict
    batch: int
    meetings: tuple[Meeting, ...]

    @property
    def mixing(self) -> tuple[Meeting, ...]:
        """The places that mix rows."""
        return tuple(m for m in self.meetings if m.effect == "mixes rows")

    def __str__(self) -> str:
        match self.verdict:
            case "mixes rows":
                return f"mixes rows: a row depends on other rows, or on its position ({_times(len(self.mixing))})"
            case "sums rows":
                return f"sums rows: rows meet only in results that have none ({_times(len(self.meetings))})"
        return f"rows apart: each of {self.batch} rows depends on itself alone, at any position"


def _times(count: int) -> str:
    return f"{count} operation{'' if count == 1 else 's'}"


def follow_rows(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch_axes: Any, platform: str
) -> BatchRows:
    """Follows the rows of a program's arguments to its results.

    Args:
        program: The traced program, a closed jaxpr.
        args: Its positional arguments.
        kwargs: Its keyword arguments; they have rows if `batch_axes` is one int.
        batch_axes: The batch axis of each argument, as in `bijax.audit`.
        platform: The target platform.

    Raises:
        TypeError: If the axes are not ints and None.
        ValueError: If they do not fit the arguments, no argument or fewer than 2 rows are batched, or the arguments are
            not those of the program.
    """
    values, batch = _arguments(program, args, kwargs, batch_axes)
    return _judged(Flow(platform).run(program, values), batch)


def _arguments(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch_axes: Any) -> tuple[list[Value], int]:
    named = [(f"argument {i}", a, x) for i, (a, x) in enumerate(zip(args, per_argument(args, batch_axes), strict=True))]
    by_name = batch_axes if isinstance(batch_axes, int) else None
    named += [(f"argument {name!r}", kwargs[name], by_name) for name in sorted(kwargs)]
    leaves: list[tuple[str, str, Any, int | None]] = []
    for name, argument, axes in named:
        flat = per_leaf(axes, argument, f"batch_axes for {name}", name)
        paths = jax.tree_util.tree_leaves_with_path(argument, is_leaf=lambda x: x is None)
        leaves += [
            (name, f"{name}{jax.tree_util.keystr(path)}", leaf, axis)
            for (path, leaf), axis in zip(paths, flat, strict=True)
            if leaf is not None
        ]
    avals = program.in_avals
    shapes = [jax.numpy.shape(leaf) if not hasattr(leaf, "shape") else tuple(leaf.shape) for *_, leaf, _ in leaves]
    if [tuple(a.shape) for a in avals] != shapes:
        raise ValueError(
            f"bijax.audit: batch_axes needs a program whose arguments are the {len(shapes)} arrays passed; it has"
            f" {len(avals)}. Bind static arguments with functools.partial, and pass a function instead of one that"
            " rearranges its arguments."
        )
    counts = _counts(
        [(of, name, shape, axis) for (of, name, _, axis), shape in zip(leaves, shapes, strict=True)], batch_axes
    )
    values = [
        unknown_array(aval) if axis is None else Value(along(axis % len(aval.shape), counts))
        for aval, (*_, axis) in zip(avals, leaves, strict=True)
    ]
    return values, counts


def _counts(leaves: Sequence[tuple[str, str, tuple[Any, ...], int | None]], batch_axes: Any) -> int:
    """Returns the number of rows."""
    batched = [(of, name, shape, axis) for of, name, shape, axis in leaves if axis is not None]
    for _, name, shape, axis in batched:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"bijax.audit: batch_axes: expected an axis of {name}, which has the shape {shape}; got {axis}. Mark"
                " arguments without rows, such as weights, with None."
            )
    counts = [(name, shape[axis]) for _, name, shape, axis in batched]
    if not counts:
        raise ValueError(f"bijax.audit: expected at least one array with a batch axis; got {batch_axes=}.")
    found = {n for _, n in counts}
    if len(found) > 1:
        raise ValueError(f"bijax.audit: {different_counts(counts, [of for of, *_ in batched], batch_axes)}")
    (rows,) = found
    if not isinstance(rows, int) or rows < 2:
        raise ValueError(
            f"bijax.audit: expected at least 2 rows along the batch axes, so that they can meet; got {rows}. Pass"
            " jax.ShapeDtypeStruct of a larger batch: nothing is computed."
        )
    return rows


def _judged(results: Sequence[Value], batch: int) -> BatchRows:
    mixing: set[Place] = set()
    sums: set[Place] = set()
    for value in results:
        mixing |= value.mixing
        if value.rows is not None:
            mixing |= value.scaled
        else:
            sums |= value.scaled | value.sums
    found = [_meeting(p, "mixes rows") for p in sorted(mixing)]
    found += [_meeting(p, "sums rows") for p in sorted(sums - mixing)]
    verdict: RowsVerdict = "mixes rows" if mixing else "sums rows" if sums else "rows apart"
    return BatchRows(verdict, batch, tuple(dict.fromkeys(found)))


def _meeting(place: Place, effect: RowsVerdict) -> Meeting:
    return Meeting(effect, place.primitive, place.line, REASONS[place.kind])
