"""The order in which the values of one element are combined: windows, scatters, devices."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FoldContract:
    """How values that meet in one place are combined: one after the other, upwards, starting at what is there.

    - "window": the elements of a sliding window, axis by axis; the windows that choose one element, by its place in
      them; the elements of a window under a function of the user's, in row-major order.
    - "scatter": the updates of one element, by their indices.
    - "devices": the shards of a sum over devices, by the number of the device.

    Sums are taken in float32 (float64 for float64).

    Attributes:
        over: What is combined.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> FoldContract("scatter").id
        'scatter/v1/f32-fold'
    """

    over: Literal["window", "scatter", "devices"]
    version: int = 1

    def __post_init__(self) -> None:
        if self.over not in ("window", "scatter", "devices"):
            raise ValueError(f"over must be 'window', 'scatter' or 'devices', got {self.over!r}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"{self.over}/v{self.version}/f32-fold"
