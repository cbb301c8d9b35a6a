"""The contracts of quantisation and of products of integers with scales: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final, Literal

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class QuantizeContract:
    """How a row of numbers in float32 becomes one of 8 bits and a scale.

    The scale is the largest magnitude of the row divided by the largest number of the format, at least 2**-126, and
    nan where that is not finite. Each number is divided by the scale and rounded to the format, both times to nearest
    even, -0 to 0; where the scale is nan all are zeros. Every step is rounded correctly, and a maximum is the same in
    any order, so the bits are the same on every platform (a CPU takes subnormal numbers for zeros).

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


@dataclass(frozen=True)
class Float8Contract:
    """How one element of a product of float8_e4m3fn matrices with scales is computed.

    K is cut into blocks of 128, the last one padded with zeros. The products of a block are summed

    - "float32": as `bijax.matmul` on the platform sums those of bfloat16, which hold every float8 number,
    - "wgmma32": by the tensor core of a Hopper GPU, 32 of K at a time, upwards. The core aligns the products of a step
      with the sum so far and keeps about 14 bits of them, so a block has an error of up to 2**-13 of its largest
      partial sum.

    The sums of the blocks are added in float32, upwards, so that errors do not grow with K beyond those of float32
    (DeepSeek-V3 technical report, section 3.3.2). Scales and bias follow as in `QuantContract`.

    Attributes:
        sums: How a block is summed.
        block: Elements of K in a block.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> Float8Contract().id
        'float8/v1/f32-blocks128-f32-scales'
    """

    sums: Literal["float32", "wgmma32"] = "float32"
    block: int = 128
    version: int = 1

    def __post_init__(self) -> None:
        if self.sums not in ("float32", "wgmma32"):
            raise ValueError(f"sums must be 'float32' or 'wgmma32', got {self.sums!r}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"float8/v{self.version}/{'f32' if self.sums == 'float32' else self.sums}-blocks{self.block}-f32-scales"
