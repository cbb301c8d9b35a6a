"""How JAX's gathers and scatters are told of windows of full rank, whose starts are rows of numbers."""

from jax import lax


def scattered(rank: int) -> lax.ScatterDimensionNumbers:
    """Returns the numbers of a scatter of (M, ...) windows into an array of `rank` axes by (M, rank) starts."""
    return lax.ScatterDimensionNumbers(tuple(range(1, rank + 1)), (), tuple(range(rank)))


def gathered(rank: int) -> lax.GatherDimensionNumbers:
    """Returns the numbers of a gather of (M, ...) windows from an array of `rank` axes by (M, rank) starts."""
    return lax.GatherDimensionNumbers(tuple(range(1, rank + 1)), (), tuple(range(rank)))
