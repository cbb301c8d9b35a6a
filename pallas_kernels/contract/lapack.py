"""Factorisations of small matrices by LAPACK."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract

LARGEST: Final = 25
"""The largest number of rows or columns of a matrix that is passed to LAPACK.

Up to this size, LAPACK uses neither divide-and-conquer (above 25, for eigenvalues and singular values) nor blocking (of
32 columns), and OpenBLAS runs each routine in one thread, regardless of the number of threads.
"""


@dataclass(frozen=True)
class LapackContract(Contract):
    """How LAPACK factorises a matrix: one call per matrix.

    XLA aligns the arrays of a call to 64 bytes, so every matrix has the same alignment. Within a batch, matrices of odd
    length do not, and the vector code of some processors then adds in a different order. The bits depend on the
    library (SciPy's) and on the processor.

    Example:
        >>> LapackContract().id
        'lapack/v1/one-matrix'
    """

    ID = "lapack/v{version}/one-matrix"


def lapack_contract(shape: Sequence[int]) -> LapackContract | None:
    """Returns the contract under which LAPACK factorises a matrix; None if it is not used.

    Args:
        shape: Rows and columns of the matrix.
    """
    return LapackContract() if all(1 <= n <= LARGEST for n in shape) else None
