"""How the channels of a convolution are divided into heads."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Heads:
    """Heads of queries, keys and values, in this order, among the channels of a convolution.

    Attributes:
        keys: Heads of the queries, and as many of the keys.
        values: Heads of the values.
        width: Channels of a head of queries and keys.
        value_width: Channels of a head of values.
        eps: Added to the sum of the squares of a head of queries or keys before it is divided by its length.
    """

    keys: int
    values: int
    width: int
    value_width: int
    eps: float

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return 2 * self.keys * self.width + self.values * self.value_width

    @property
    def of_norm(self) -> dict[str, float]:
        """The parameters of `rms_norm` that divide a row by its length."""
        width = max(self.width, 1)
        return {"eps": self.eps / width, "offset": float(np.float32(width**-0.5))}
