"""Factorisations of small matrices by LAPACK."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract

LARGEST: Final = {"eigh": 25, "svd": 32}
"""The largest number of rows or columns of a matrix that is passed to LAPACK, by operation; otherwise `OTHERWISE`.

Up to these sizes OpenBLAS runs each routine in one thread, regardless of the number of threads. Larger matrices are
divided: their bits depend on the number of threads. `eigh` starts threads from 26 columns on, where it divides and
conquers, `svd` from somewhere between 41 and 48, and the others between 49 and 64.
"""

OTHERWISE: Final = 48


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


def lapack_contract(name: str, shape: Sequence[int]) -> LapackContract | None:
    """Returns the contract under which LAPACK factorises a matrix; None if it is not used.

    Args:
        name: Name of the operation's primitive.
        shape: Rows and columns of the matrix.
    """
    largest = LARGEST.get(name, OTHERWISE)
    return LapackContract() if all(1 <= n <= largest for n in shape) else None
