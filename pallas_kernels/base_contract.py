"""What every contract has: a version, and an identifier."""

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Contract:
    """Everything that determines the bits of an operation; see `pallas_kernels.contract`.

    Each contract is a frozen dataclass derived from this one, whose docstring describes the arithmetic.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> @dataclass(frozen=True)
        ... class Halves(Contract):
        ...     ID = "halves/v{version}/block{block}"
        ...     block: int = 8
        >>> Halves(16).id
        'halves/v1/block16'
    """

    ID: ClassVar[str]
    """The identifier, with the names of attributes in braces."""

    version: int = field(default=1, kw_only=True)

    @property
    def id(self) -> str:
        """Identifier of the contract, stable across runs and machines."""
        return self.ID.format_map(vars(self))
