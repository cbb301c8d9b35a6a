"""Errors of HLO inspection."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bijax.hlo._report import Report


class HloParseError(ValueError):
    """A text is not an HLO module, or holds an instruction that cannot be read.

    Example:
        >>> from bijax.hlo import inspect
        >>> inspect("not a module")
        Traceback (most recent call last):
        bijax.hlo.errors.HloParseError: expected the text of an HLO module, which has a line "HloModule NAME"; ...
    """


class HloInvarianceError(AssertionError):
    """A compiled program holds reductions whose bits may depend on the size of the batch.

    Attributes:
        report: Everything that was found.
    """

    def __init__(self, report: "Report"):
        found = len(report.variant)
        self.report = report
        # A program with our code in it has been transformed, or is made of bijax operations in part.
        has_ours = report.ours or any("bijax kernel" in f.reason for f in report.variant)
        advice = (
            " Compute with bijax operations what is not yet; what was transformed with bijax.invariant and is listed"
            " nevertheless is compiled in a way that bijax does not know: please report it, and compare the bits"
            " (bijax.testing)."
            if has_ours
            else " Compute these with bijax operations, or transform the function with bijax.invariant."
        )
        super().__init__(
            f"expected a program without reductions that XLA may order by the size of the batch; found {found} of"
            f" them.{advice}\n{report}"
        )
