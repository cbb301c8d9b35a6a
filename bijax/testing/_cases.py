"""The cases of a sweep: the position of each row, and its neighbours."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bijax.testing._data import NEIGHBOUR_KINDS

BATCH_SIZES = (1, 2, 3, 5, 8, 17, 33, 64)
"""The batch sizes tried by default."""

NEIGHBOURS = ("given", "permuted", "copies", *NEIGHBOUR_KINDS)
"""The kinds of neighbours tried by default."""

MODES = ("jit", "eager")
"""The ways of calling the function tried by default."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        neighbours: the kind of neighbours, one of `NEIGHBOURS`; "alone" for a batch of 1.
        row_ids: int array, the given row at each position.
        subject: bool array, the positions whose outputs are compared; the others hold hostile values.
    """

    neighbours: str
    row_ids: np.ndarray
    subject: np.ndarray


def cases(batch_size: int, rows: int, neighbours: Sequence[str], rng: np.random.Generator) -> Iterator[Case]:
    """Gives the cases of one batch size. Batches larger than the given rows repeat them."""
    everyone = np.ones(batch_size, bool)
    if batch_size == 1:
        for row in range(min(rows, 8)):
            yield Case("alone", np.array([row]), everyone)
        return
    if batch_size == 0:
        yield Case("none", np.zeros(0, int), everyone)
        return
    for kind in neighbours:
        if kind == "given":
            for offset in (0, int(rng.integers(1, rows))):
                yield Case(kind, (offset + np.arange(batch_size)) % rows, everyone)
        elif kind == "permuted":
            for _ in range(2):
                yield Case(kind, _mixed(batch_size, rows, rng), everyone)
        elif kind == "copies":
            yield Case(kind, np.full(batch_size, rng.integers(rows)), everyone)
        else:
            # Every position is a subject in one of the first two; in the last one a row is alone among strangers.
            even = np.arange(batch_size) % 2 == 0
            lone = np.arange(batch_size) == rng.integers(batch_size)
            for subject in (even, ~even, lone):
                yield Case(kind, _mixed(batch_size, rows, rng), subject)


def check_choices(
    batch_sizes: Sequence[int], neighbours: Sequence[str], modes: Sequence[str], has_floats: bool
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Checks a caller's choices; gives the batch sizes starting with 1, the neighbours that can be made, and the modes.

    Raises:
        TypeError: a batch size is not an int.
        ValueError: a batch size is negative, a name is unknown, or nothing is left to try.
    """
    if not isinstance(batch_sizes, Iterable):
        raise TypeError(f"batch_sizes: expected a sequence of ints; got {batch_sizes!r}.")
    sizes = tuple(batch_sizes)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"batch_sizes: expected ints; got {size!r} of type {type(size).__name__}.")
        if size < 0:
            raise ValueError(f"batch_sizes: expected sizes of 0 or more; got {size} in {sizes}.")
    if not sizes:
        raise ValueError(f"batch_sizes: expected at least one size; got none. The default is {BATCH_SIZES}.")
    _check_names("neighbours", neighbours, NEIGHBOURS)
    _check_names("modes", modes, MODES)
    possible = tuple(kind for kind in neighbours if has_floats or kind not in NEIGHBOUR_KINDS)
    if not possible:
        raise ValueError(
            f"neighbours: {tuple(neighbours)} need a batched array of float16, bfloat16, float32 or float64; got none. "
            "Add 'given', 'permuted' or 'copies', which need no such array."
        )
    return tuple(dict.fromkeys((1, *(int(size) for size in sizes)))), possible, tuple(modes)


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not names or any(name not in known for name in names):
        raise ValueError(f"{what}: expected a non-empty sequence of names among {', '.join(known)}; got {names!r}.")


def _mixed(batch_size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.resize(rng.permutation(rows), batch_size))
