"""The findings of a batch-invariance sweep."""

import dataclasses
from typing import Final

from bijax.testing._compare import ElementDifference, describe_largest


@dataclasses.dataclass(frozen=True)
class BatchDifference:
    """A row whose bits in a batch differ from those of the row alone.

    Attributes:
        batch_size: size of the batch.
        row: index of the row among the caller's.
        position: the row's position in the batch.
        neighbours: the kind of neighbours, one of `NEIGHBOURS`; "alone" for a batch of 1.
        mode: how the function was called, "jit" or "eager".
        reference_mode: how it was called for the row alone.
        output: path of the output in the function's result.
        differing: number of elements of that output's row that differ.
        size: number of elements of that output's row.
        element: the first of them; its index counts within the row (the batch axis left out), `actual` is the value in
            the batch and `expected` that of the row alone.
    """

    batch_size: int
    row: int
    position: int
    neighbours: str
    mode: str
    reference_mode: str
    output: str
    differing: int
    size: int
    element: ElementDifference

    @property
    def case(self) -> str:
        """The case in words."""
        if self.batch_size == 1:
            return f"batch of 1, row {self.row} alone, {self.mode}"
        where = f"row {self.row} at position {self.position}"
        return f"batch of {self.batch_size}, {where}, neighbours {self.neighbours}, {self.mode}"


@dataclasses.dataclass(frozen=True)
class BatchVarianceReport:
    """The figures of a sweep. Printed, it is the message of `BatchInvarianceError`.

    Attributes:
        cases: number of batches run.
        differing_cases: number of those with a difference.
        elements: number of output elements compared.
        differing_elements: number of those that differ.
        max_ulp_distance: the largest ULP distance; None if no difference has one.
        nan_mismatches: number of differing elements without a distance because a nan takes part.
        differing_batch_sizes: the batch sizes with a difference.
        first: the first difference; None if there is none.
        too_large_for_rounding: whether values differ by more than another order of additions explains: rows that hold
            the same numbers give results that differ in more than half of their digits, or in integers.
    """

    cases: int
    differing_cases: int
    elements: int
    differing_elements: int
    max_ulp_distance: int | None
    nan_mismatches: int
    differing_batch_sizes: tuple[int, ...]
    first: BatchDifference | None
    too_large_for_rounding: bool = False

    @property
    def invariant(self) -> bool:
        """Whether no difference was found."""
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return f"no difference in {self.cases} cases, {self.elements} elements"
        first, element = self.first, self.first.element
        return (
            f"not batch-invariant, first difference: {first.case}\n"
            f"  reference: row {first.row} alone, {first.reference_mode}{_hint(first)}\n"
            f"  {first.output}: {first.differing} of {first.size} elements of the row differ, first {element.index}\n"
            f"    alone    {element.expected!s} {element.expected_bits}\n"
            f"    in batch {element.actual!s} {element.actual_bits}\n"
            f"    ULP distance {element.describe_ulp()}\n"
            f"in all {self.differing_cases} of {self.cases} cases and {self.differing_elements} of {self.elements} "
            f"elements differ, at batch sizes {', '.join(map(str, self.differing_batch_sizes))}\n"
            f"  largest ULP distance {describe_largest(self.max_ulp_distance, self.nan_mismatches)}"
            f"{_MIXES if self.too_large_for_rounding else ''}"
        )


_MIXES: Final = (
    "\nThese differences are too large for rounding: the function seems to mix rows (batch normalisation in training,"
    " a mean over the batch axis, one key for the noise of all rows, a loop that stops for all rows at once), or to"
    " depend on their positions. bijax.audit(fn, *args, batch_axes=...) finds the lines."
)


class BatchInvarianceError(AssertionError):
    """The bits of a function's rows changed with the other rows of the batch.

    Attributes:
        report: the `BatchVarianceReport` of the sweep.
        first: its first difference.
    """

    def __init__(self, report: BatchVarianceReport):
        super().__init__(report)
        self.report = report
        self.first = report.first


def _hint(first: BatchDifference) -> str:
    if first.batch_size != 1:
        return ""
    if first.mode == first.reference_mode:
        return " (the same call again: the function is not deterministic)"
    one_mode = f"modes=({first.reference_mode!r},)"
    return f" (no batch takes part: {first.mode} and {first.reference_mode} differ; {one_mode} tries one)"
