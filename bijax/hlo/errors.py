"""Errors of HLO inspection."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._report import Report


class HloParseError(ValueError):
    """A text is not an HLO module, or holds an instruction that cannot be read.

    Example:
        >>> from bijax.hlo import inspect
        >>> inspect("not a module")
        Traceback (most recent call last):
        bijax.hlo.errors.HloParseError: expected the text of an HLO module, which has a line "HloModule NAME"; ...
    """


class HloInvarianceError(AssertionError):
    """A compiled program holds reductions whose bits may follow the size of the batch.

    Attributes:
        report: Everything that was found.
    """

    def __init__(self, report: "Report"):
        found = len(report.variant)
        self.report = report
        super().__init__(
            f"expected a program without reductions that XLA may order by the size of the batch; found {found} of them."
            " Compute these with bijax operations, or transform the function with bijax.invariant.\n"
            f"{report}"
        )
