"""Which layer a linear layer becomes that is cut over devices."""

from typing import Any

from .layers import QuantLinear
from .parallel_cut import Cut
from .parallel_layers import ColumnParallelLinear, RowParallelLinear
from .parallel_quant import ColumnParallelQuantLinear, GatheredQuantLinear


def column_parallel_layer(
    layer: Any, parts: tuple[int, ...], cut: Cut
) -> ColumnParallelLinear | ColumnParallelQuantLinear:
    """Returns a linear layer, of int8 or not, whose columns are cut.

    Args:
        layer: The layer of one device.
        parts: Numbers of columns of the projections that it computes side by side.
        cut: How the model is cut.
    """
    if isinstance(layer, QuantLinear):
        return ColumnParallelQuantLinear(layer, parts, cut)
    return ColumnParallelLinear(layer, parts, cut)


def row_parallel_layer(layer: Any, cut: Cut) -> RowParallelLinear | GatheredQuantLinear:
    """Returns a linear layer, of int8 or not, whose input is cut by columns."""
    return GatheredQuantLinear(layer, cut) if isinstance(layer, QuantLinear) else RowParallelLinear(layer, cut)
