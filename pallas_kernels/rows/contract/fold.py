"""The order in which the values of one element are combined: windows and scatters."""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class FoldContract(Contract):
    """How values with the same target are combined: sequentially in ascending order, starting from the existing value.

    - "window": the elements of a sliding window, axis by axis; the windows that select one element, by its position in
      them; the elements of a window under a user's function, in row-major order.
    - "scatter": the updates of one element, by their indices.

    Sums are computed in float32 (float64 for float64).

    Attributes:
        over: The kind of values that are combined.

    Example:
        >>> FoldContract("scatter").id
        'scatter/v1/f32-fold'
    """

    ID = "{over}/v{version}/f32-fold"
    over: Literal["window", "scatter"]

    def __post_init__(self) -> None:
        if self.over not in ("window", "scatter"):
            raise ValueError(f"over must be 'window' or 'scatter', got {self.over!r}.")
