"""The contracts of quantisation and of products of integers with scales: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final, Literal

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class QuantizeContract:
    """How a row of numbers in float32 becomes one of 8 bits and a scale.

    The scale is the largest magnitude of the row divided by the largest number of the format, at least 2**-126, and
    nan where that is not finite. Each number is divided by the scale and rounded to the format, both times to nearest
    even; where the scale is nan all are zeros. Every step is rounded correctly, and a maximum is the same in any order,
    so the bits are the same on every platform (a CPU takes subnormal numbers for zeros).

    Attributes:
        format: Name of the dtype of 8 bits.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> QuantizeContract().id, QuantizeContract("float8_e4m3fn").largest
        ('quantize/v1/f32-int8', 448.0)
    """

    format: Literal["int8", "float8_e4m3fn"] = "int8"
    version: int = 1

    def __post_init__(self) -> None:
        if self.format not in _LARGEST:
            raise ValueError(f"format must be one of {', '.join(_LARGEST)}, got {self.format!r}.")

    @property
    def largest(self) -> float:
        """Largest magnitude that a quantised number has."""
        return _LARGEST[self.format]

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"quantize/v{self.version}/f32-{self.format}"


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
