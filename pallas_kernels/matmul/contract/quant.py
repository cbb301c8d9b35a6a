"""Contracts of quantisation and of scaled 8-bit products: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Final, Literal

from pallas_kernels.base_contract import Contract

_LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0}
_FLOAT8_SUMS: Final = ("float32", "wgmma32", "mma32")


@dataclass(frozen=True)
class QuantizeContract(Contract):
    """How a float32 row is quantised to 8 bits with a scale.

    The scale is the largest magnitude of the row divided by the largest number of the format, at least 2**-126, or nan
    if that is not finite. Each number is divided by the scale and rounded to the format, both to nearest even, and -0
    becomes 0; if the scale is nan, all are zeros. Every step is correctly rounded and a maximum is independent of
    order, so the bits are the same on every platform (a CPU flushes subnormal numbers to zero).

    Attributes:
        format: Name of the 8-bit dtype.

    Example:
        >>> QuantizeContract().id, QuantizeContract("float8_e4m3fn").largest
        ('quantize/v1/f32-int8', 448.0)
    """

    ID = "quantize/v{version}/f32-{format}"
    format: Literal["int8", "float8_e4m3fn"] = "int8"

    def __post_init__(self) -> None:
        if self.format not in _LARGEST:
            raise ValueError(f"format must be one of {', '.join(_LARGEST)}, got {self.format!r}.")

    @property
    def largest(self) -> float:
        """Largest magnitude of a quantised number."""
        return _LARGEST[self.format]


@dataclass(frozen=True)
class QuantContract(Contract):
    """How one element of a scaled product of int8 matrices is computed.

    The integer products are summed exactly in int32. The sum is converted to float32, multiplied by the row scale, then
    by the column scale, and a bias is added, each step rounded to nearest even; the result is then rounded to its
    dtype.

    Example:
        >>> QuantContract().id
        'quant/v1/int32-exact-f32-scales'
    """

    ID = "quant/v{version}/int32-exact-f32-scales"


@dataclass(frozen=True)
class Float8Contract(Contract):
    """How one element of a scaled product of float8_e4m3fn matrices is computed.

    K is split into blocks of 128, the last one zero-padded. The products of a block are summed

    - "float32": as `bijax.matmul` sums bfloat16 products on the platform (bfloat16 represents every float8 number),
    - "wgmma32": by the tensor core of a Hopper GPU, 32 elements of K at a time in ascending order. It aligns the
      products of a step with the running sum and keeps about 14 bits, so the error of a block is up to 2**-13 of its
      largest partial sum.
    - "mma32": by the tensor core of other GPUs, 32 elements of K at a time in ascending order, by the instruction
      `mma.sync.m16n8k32`. How it adds its products belongs to the architecture.

    The block sums are added in float32 in ascending order, so that errors grow with K only as in float32
    (DeepSeek-V3 technical report, section 3.3.2). Scales and bias are applied as in `QuantContract`.

    Attributes:
        sums: How a block is summed.
        block: Elements of K in a block.

    Example:
        >>> Float8Contract().id
        'float8/v1/f32-blocks128-f32-scales'
    """

    sums: Literal["float32", "wgmma32", "mma32"] = "float32"
    block: int = 128

    def __post_init__(self) -> None:
        if self.sums not in _FLOAT8_SUMS:
            raise ValueError(f"sums must be one of {', '.join(_FLOAT8_SUMS)}, got {self.sums!r}.")

    @property
    def id(self) -> str:
        """Contract identifier, stable across runs and machines."""
        return f"float8/v{self.version}/{'f32' if self.sums == 'float32' else self.sums}-blocks{self.block}-f32-scales"
