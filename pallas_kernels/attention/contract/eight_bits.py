"""The contract of 8-bit keys and values: see `pallas_kernels.contract`."""

from dataclasses import dataclass, field
from typing import Final

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class EightBitContract(Contract):
    """How a query attends to 8-bit keys and values, with a scale per head, or per head and channel.

    The stored numbers enter the products exactly, as multiples of `unit`; the scales are applied to the queries and the
    results. With f and g the scales of keys and of values

        q' = round(q * (f / unit))
        o  = attention(q', keys * unit, values * unit), by the contract of the platform, rounded
        out = round(o * (g / unit))

    Everything is in the dtype of the queries except the products, which are float32. The log-sum-exp is from the second
    line. The unit keeps products with float16 queries in the range they have with float16 keys.

    Attributes:
        unit: The value that 1 represents, a power of two.
    """

    ID = "8-bit-cache/v{version}/factors-outside-unit{unit}"
    unit: float
    version: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        if self.unit not in _UNITS.values():
            raise ValueError(f"unit must be one of {sorted(_UNITS.values())}, got {self.unit}.")


_UNITS: Final = {"int8": 2.0**-6, "float8_e4m3fn": 2.0**-8}


def eight_bit_contract(dtype: str) -> EightBitContract:
    """Returns the contract of a cache of the dtype with this name, int8 or float8_e4m3fn.

    Example:
        >>> eight_bit_contract("int8").unit
        0.015625
    """
    return EightBitContract(_UNITS[dtype])
