"""Errors of the transform."""


class NotInvariantError(NotImplementedError):
    """A program under `bijax.invariant` holds an operation that cannot be made batch-invariant.

    Attributes:
        primitive: Name of the operation, as `allow` takes it.
        reason: Why it cannot be made invariant.
        line: Where the user's program asks for it, "FILE:LINE"; empty if unknown.
    """

    def __init__(self, primitive: str, operation: str, reason: str, line: str = "") -> None:
        self.primitive, self.operation, self.reason, self.line = primitive, operation, reason, line
        super().__init__(primitive, operation, reason, line)

    def __str__(self) -> str:
        return (
            f"bijax.invariant: the operation {self.operation}, asked for at {self.line or 'an unknown line'}, cannot be"
            f" made batch-invariant: {self.reason}. Rewrite it with other operations, compute it outside, or let it"
            f" pass with allow=({self.primitive!r},) if you know that its bits do not depend on the batch. bijax.audit"
            " lists all such operations of a program before it runs."
        )
