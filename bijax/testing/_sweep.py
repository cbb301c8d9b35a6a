"""Batch-invariance sweeps over any function."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bijax.core.checks import check_callable
from bijax.testing._batch import BatchedCall, output_rows
from bijax.testing._batch_report import BatchDifference, BatchInvarianceError, BatchVarianceReport
from bijax.testing._bits import unequal_bits
from bijax.testing._cases import BATCH_SIZES, MODES, NEIGHBOURS, Case, cases, check_choices
from bijax.testing._compare import ArrayDifference, ElementDifference, compare_bits, too_large_for_rounding


def assert_batch_invariant(
    fn: Callable[..., Any],
    *args: Any,
    batch_axes: Any = 0,
    out_batch_axes: Any = 0,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    neighbours: Sequence[str] = NEIGHBOURS,
    modes: Sequence[str] = MODES,
    seed: int = 0,
    nan_bits: bool = False,
) -> None:
    """Asserts that each row's output bits depend on that row alone, not on its batch.

    Rows are computed alone, in a batch of 1, and then in batches of other sizes, at every position, among neighbours of
    many kinds; their bits must not change. A pass is evidence from the cases tried, not proof: give at least
    8 rows, of the shapes and dtypes that you use, and the batch sizes that you use if they are larger.

    Args:
        fn: any function of arrays (jitted or not), called with positional arguments; bind others with
            `functools.partial`.
        *args: its arguments. Those with a batch axis hold at least 2 rows; larger batches repeat them.
        batch_axes: the batch axis of each argument as in `jax.vmap`'s `in_axes`: an int, or a tuple with an int, None
            or a pytree of them per argument. Arguments marked None (weights, options) are passed through untouched;
            under jit their arrays are traced and everything else in them stays a Python value.
        out_batch_axes: the batch axis of each output: an int, or a pytree of ints and None that is a prefix of the
            output. Outputs marked None are not compared.
        batch_sizes: the sizes to try. Under jit each costs one compilation. 1 is always tried. At 0 only the shape and
            dtype of a row are compared.
        neighbours: the kinds of neighbouring rows to try. `given`: the given rows in their order, `permuted`: shuffled,
            `copies`: the row itself everywhere; `normal`, `huge`, `inf`, `nan`, `zeros`, `denormal`: such values in all
            floating batched arrays of the neighbours, at every second position and at all positions but one. Integer
            and bool arrays always hold given rows; where no batched array is floating, the value kinds are left out.
        modes: ways to call `fn`, `jit` (inside `jax.jit`) and `eager` (as it is). The first one gives the reference, so
            with both, jit and eager must agree as well.
        seed: fixes the rows, positions and values chosen.
        nan_bits: whether the signs and payloads of nans are compared too. No operation of bijax promises them, so a nan
            is taken as equal to any nan in its place.

    Raises:
        BatchInvarianceError: a bit changed. It is an AssertionError; its message and its `report` name the first row
            that differs, its batch, its neighbours, the index in the row, both bit patterns and the ULP distance.
        ValueError: fewer than 2 rows, batch sizes that disagree, axes that do not fit, an unknown name, or a function
            whose output has no such axis or changes its row shape or dtype with the batch size.
        TypeError: axes or sizes that are not ints, or a dtype whose bits cannot be compared.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.linspace(-1.0, 1.0, 8 * 4).reshape(8, 4)
        >>> assert_batch_invariant(lambda x, shift: jnp.maximum(x, shift), x, jnp.zeros(4), batch_axes=(0, None))
        >>> assert_batch_invariant(lambda x: x - x.max(), x)
        Traceback (most recent call last):
            ...
        bijax.testing._batch_report.BatchInvarianceError: not batch-invariant, first difference: batch of 2, ...
    """
    report = batch_variance_report(
        fn,
        *args,
        batch_axes=batch_axes,
        out_batch_axes=out_batch_axes,
        batch_sizes=batch_sizes,
        neighbours=neighbours,
        modes=modes,
        seed=seed,
        nan_bits=nan_bits,
    )
    if not report.invariant:
        raise BatchInvarianceError(report)


def batch_variance_report(
    fn: Callable[..., Any],
    *args: Any,
    batch_axes: Any = 0,
    out_batch_axes: Any = 0,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    neighbours: Sequence[str] = NEIGHBOURS,
    modes: Sequence[str] = MODES,
    seed: int = 0,
    nan_bits: bool = False,
) -> BatchVarianceReport:
    """Runs the sweep of `assert_batch_invariant` and gives its figures, whether or not a bit changed.

    Args:
        fn: see `assert_batch_invariant`, as for all the others.
        *args: its arguments.
        batch_axes: the batch axis of each argument.
        out_batch_axes: the batch axis of each output.
        batch_sizes: the sizes to try.
        neighbours: the kinds of neighbouring rows to try.
        modes: ways to call `fn`.
        seed: fixes the rows, positions and values chosen.
        nan_bits: whether the signs and payloads of nans are compared too.

    Returns:
        The `BatchVarianceReport` of the whole sweep.

    Raises:
        ValueError: as `assert_batch_invariant`.
        TypeError: as `assert_batch_invariant`.

    Example:
        >>> import jax.numpy as jnp
        >>> report = batch_variance_report(lambda x: x - x.max(), jnp.arange(8.0), batch_sizes=(2, 3), modes=("jit",))
        >>> report.invariant, report.differing_batch_sizes
        (False, (2, 3))
    """
    check_callable("bijax.testing", fn)
    call = BatchedCall(args, batch_axes)
    sizes, kinds, modes = check_choices(batch_sizes, neighbours, modes, call.has_floats)
    runner = _Runner(fn, call, out_batch_axes, modes[0])
    tally = _Tally(nan_bits)
    for mode in modes:
        # Reseeded, so that every mode sees the same cases and the same values.
        rng = np.random.default_rng(seed)
        for case in itertools.chain.from_iterable(cases(size, call.rows, kinds, rng) for size in sizes):
            tally.add(case, mode, modes[0], runner.compare(case, mode, rng))
    return tally.report()


class _Runner:
    """Runs one function on batches and compares each row with its result alone."""

    def __init__(self, fn: Callable[..., Any], call: BatchedCall, out_batch_axes: Any, reference_mode: str):
        self._fn = fn
        self._call = call
        self._out_batch_axes = out_batch_axes
        self._reference_mode = reference_mode
        # A new function object: two sweeps over one `fn` do not share jit's cache, nor keep it alive.
        self._jitted = jax.jit(lambda batch, unbatched: fn(*call.arguments(batch, unbatched)))
        self._alone: dict[int, tuple[tuple[str, np.ndarray], ...]] = {}

    def compare(self, case: Case, mode: str, rng: np.random.Generator) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Gives (output, rows in the batch, the same rows alone) for the subjects of a case."""
        found = self._run(case, mode, rng)
        alone = [self._reference(int(row)) for row in (case.row_ids[case.subject] if len(case.row_ids) else [0])]
        signatures = [[(name, rows.dtype, rows.shape[1:]) for name, rows in one] for one in (found, alone[0])]
        if signatures[0] != signatures[1]:
            raise ValueError(
                "expected outputs whose rows have the same structure, dtype and shape at every batch size; got "
                f"{signatures[0]} for a batch of {len(case.row_ids)} ({mode}) and {signatures[1]} for a batch of 1 "
                f"({self._reference_mode})."
            )
        return [
            (name, rows[case.subject], np.concatenate([one[i][1] for one in alone])[: np.count_nonzero(case.subject)])
            for i, (name, rows) in enumerate(found)
        ]

    def _reference(self, row: int) -> tuple[tuple[str, np.ndarray], ...]:
        if row not in self._alone:
            case = Case("alone", np.array([row]), np.ones(1, bool))
            self._alone[row] = self._run(case, self._reference_mode, np.random.default_rng(0))
        return self._alone[row]

    def _run(self, case: Case, mode: str, rng: np.random.Generator) -> tuple[tuple[str, np.ndarray], ...]:
        batch = self._call.batch(case.row_ids, ~case.subject, case.neighbours, rng)
        try:
            if mode == "jit":
                out = self._jitted(batch, self._call.unbatched_arrays())
            else:
                out = self._fn(*self._call.arguments(batch))
        except Exception as error:
            error.add_note(f"raised in a batch of {len(case.row_ids)}, neighbours {case.neighbours}, {mode}")
            raise
        return output_rows(out, self._out_batch_axes, len(case.row_ids))


class _Tally:
    """Counts what differs, and keeps the first difference."""

    def __init__(self, nan_bits: bool) -> None:
        self._nan_bits = nan_bits
        self._cases = self._differing_cases = self._elements = self._differing = self._nan_mismatches = 0
        self._largest: int | None = None
        self._large = False
        self._sizes: dict[int, None] = {}
        self._first: BatchDifference | None = None

    def add(
        self, case: Case, mode: str, reference_mode: str, outputs: list[tuple[str, np.ndarray, np.ndarray]]
    ) -> None:
        self._cases += 1
        self._elements += sum(rows.size for _, rows, _ in outputs)
        found = [
            (name, rows, alone, difference)
            for name, rows, alone in outputs
            if (difference := compare_bits(rows, alone, self._nan_bits)) is not None
        ]
        if not found:
            return
        self._differing_cases += 1
        self._sizes[len(case.row_ids)] = None
        for _, rows, alone, difference in found:
            self._count(difference)
            self._large = self._large or too_large_for_rounding(rows, alone)
        if self._first is None:
            # The earliest position over all outputs, then the earliest output.
            name, rows, alone, difference = min(found, key=lambda item: item[3].first.index[0])
            self._first = _locate(case, mode, reference_mode, name, rows, alone, difference.first, self._nan_bits)

    def report(self) -> BatchVarianceReport:
        return BatchVarianceReport(
            cases=self._cases,
            differing_cases=self._differing_cases,
            elements=self._elements,
            differing_elements=self._differing,
            max_ulp_distance=self._largest,
            nan_mismatches=self._nan_mismatches,
            differing_batch_sizes=tuple(self._sizes),
            first=self._first,
            too_large_for_rounding=self._large,
        )

    def _count(self, difference: ArrayDifference) -> None:
        self._differing += difference.differing
        self._nan_mismatches += difference.nan_mismatches
        if difference.max_ulp_distance is not None:
            self._largest = max(difference.max_ulp_distance, self._largest or 0)


def _locate(
    case: Case,
    mode: str,
    reference_mode: str,
    name: str,
    rows: np.ndarray,
    alone: np.ndarray,
    first: ElementDifference,
    nan_bits: bool,
) -> BatchDifference:
    # The batch axis comes first, so the first element in row-major order is in the first row that differs.
    subject, *index = first.index
    position = int(np.flatnonzero(case.subject)[subject])
    return BatchDifference(
        batch_size=len(case.row_ids),
        row=int(case.row_ids[position]),
        position=position,
        neighbours=case.neighbours,
        mode=mode,
        reference_mode=reference_mode,
        output=name,
        differing=int(np.count_nonzero(unequal_bits(rows[subject], alone[subject], nan_bits))),
        size=rows[subject].size,
        element=ElementDifference(tuple(index), first.actual, first.expected),
    )
