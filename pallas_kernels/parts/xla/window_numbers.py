"""Dimension numbers of gathers and scatters of full-rank windows, whose starts are rows of an index array."""

from jax import lax


def scattered(rank: int) -> lax.ScatterDimensionNumbers:
    """Returns the dimension numbers of a scatter of (M, ...) windows into a rank-`rank` array by (M, rank) starts."""
    return lax.ScatterDimensionNumbers(tuple(range(1, rank + 1)), (), tuple(range(rank)))


def gathered(rank: int) -> lax.GatherDimensionNumbers:
    """Returns the dimension numbers of a gather of (M, ...) windows from a rank-`rank` array by (M, rank) starts."""
    return lax.GatherDimensionNumbers(tuple(range(1, rank + 1)), (), tuple(range(rank)))
