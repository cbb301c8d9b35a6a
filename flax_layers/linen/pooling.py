"""Pooling, for code that calls it between the layers.

Guarantee of each function: row-invariant, for the output and for the gradient of the input. A row is an example.
"""

from flax import linen

from .._mode import invariant_function

avg_pool = invariant_function(linen.avg_pool)
max_pool = invariant_function(linen.max_pool)
pool = invariant_function(linen.pooling.pool)
