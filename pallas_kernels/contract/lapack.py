"""Factorisations of small matrices by LAPACK."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGEST: Final = 25
"""The largest number of rows or columns of a matrix that is given to LAPACK.

Up to it, LAPACK neither divides (25 is its limit for eigenvalues and singular values) nor works in blocks (of 32
columns), and OpenBLAS runs each routine in one thread, however many it has.
"""


@dataclass(frozen=True)
class LapackContract:
    """How LAPACK factorises a matrix: in a call of its own.

    All arrays of a call start where XLA puts arrays, at multiples of 64 bytes, so that a call has the same alignment
    for every matrix; within a batch, matrices of odd length do not, and vector code of some processors adds in another
    order then. The bits belong to the library (that of SciPy) and to the processor.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> LapackContract().id
        'lapack/v1/one-matrix'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"lapack/v{self.version}/one-matrix"


def lapack_contract(shape: Sequence[int]) -> LapackContract | None:
    """Returns the contract under which LAPACK factorises a matrix; None if it does not.

    Args:
        shape: Rows and columns of the matrix.
    """
    return LapackContract() if all(1 <= n <= LARGEST for n in shape) else None
