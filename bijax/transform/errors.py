"""Errors of the transform."""


class NotInvariantError(NotImplementedError):
    """A program under `bijax.invariant` contains an operation that cannot be made batch-invariant.

    Attributes:
        primitive: Name of the operation, as `allow` takes it.
        operation: The operation with the types of its operands.
        reason: Why it cannot be made invariant.
        line: Where the user's program requests it, "FILE:LINE"; empty if unknown.
        library: The library's line that requests it, if any.
        may_be_allowed: Whether `allow` applies: it is neither made invariant for other operands, nor does it hold a
            whole program.
        advice: What to do; empty for rewriting, computing outside or allowing it.
    """

    def __init__(
        self,
        primitive: str,
        operation: str,
        reason: str,
        line: str = "",
        library: str = "",
        may_be_allowed: bool = True,
        advice: str = "",
    ) -> None:
        self.primitive, self.operation, self.reason, self.line = primitive, operation, reason, line
        self.library, self.may_be_allowed, self.advice = library, may_be_allowed, advice
        super().__init__(primitive, operation, reason, line, library, may_be_allowed, advice)

    def __str__(self) -> str:
        inside = f" (by {self.library})" if self.line and self.library else ""
        outside = "or compute it outside"
        if self.may_be_allowed:
            outside = (
                f"compute it outside, or let it pass with allow=({self.primitive!r},) if you know that its bits do not"
                " depend on the batch"
            )
        advice = self.advice or f"Rewrite it with other operations, {outside}."
        return (
            f"bijax.invariant: the operation {self.operation}, requested at"
            f" {self.line or self.library or 'an unknown line'}{inside}, cannot be made batch-invariant: {self.reason}."
            f" {advice} bijax.audit lists all such operations of a program before it runs."
        )
