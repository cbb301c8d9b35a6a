"""Fourier transforms by the library of XLA on a CPU."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.base_contract import Contract

SHORTEST: Final = 33
"""The least length of a transform that is passed to the library; shorter ones are products with a matrix."""

BLOCK: Final = 8
"""Number of transforms in a call of up to `LONGEST_IN_BLOCKS` elements each.

The library (DUCC) computes as many transforms at once as a vector has elements, and starts a thread for each such
group at most. Eight are one group, two or four equal ones, or all of them less than a group, whatever the vectors.
"""

LONGEST_IN_BLOCKS: Final = 2048
"""The largest length of transforms that are computed in blocks; of longer ones a block does not fit in the cache."""


@dataclass(frozen=True)
class FftContract(Contract):
    """How the library of XLA computes a Fourier transform along one axis: always the same number in one call.

    The library has different code for a single transform and for as many as fill a vector, with different bits, and
    takes one or the other by the number of rows. A call of a fixed number of transforms always takes the same. A
    transform along several axes is one along each of them. The bits depend on the version of jaxlib and on the
    processor.

    Attributes:
        transforms: Number of transforms in a call.

    Example:
        >>> FftContract(8).id
        'fft/v1/blocks-of-8'
    """

    ID = "fft/v{version}/blocks-of-{transforms}"
    transforms: int

    def __post_init__(self) -> None:
        if self.transforms < 1:
            raise ValueError(f"transforms must be at least 1, got {self.transforms}.")


def fft_contract(length: int) -> FftContract | None:
    """Returns the contract under which the library computes a transform; None if it is not used.

    Args:
        length: Length of the transform.
    """
    if length < SHORTEST:
        return None
    return FftContract(BLOCK if length <= LONGEST_IN_BLOCKS else 1)
