"""The contract of products of integers with scales: see `pallas_kernels.contract`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantContract:
    """How one element of a product of int8 matrices with scales is computed.

    The products of integers are summed exactly, in int32. The sum is converted to float32, multiplied by the scale of
    its row, then by that of its column, and a bias is added, each step rounded to nearest even; the result is rounded
    once more to its own dtype.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> QuantContract().id
        'quant/v1/int32-exact-f32-scales'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"quant/v{self.version}/int32-exact-f32-scales"
