"""Pooling, for code that calls it between the layers.

Guarantee of each function: row-invariant, for the output and for the gradient of the input. A row is an example.
"""

from flax import nnx

from .._mode import invariant_function

avg_pool = invariant_function(nnx.avg_pool)
max_pool = invariant_function(nnx.max_pool)
min_pool = invariant_function(nnx.min_pool)
pool = invariant_function(nnx.pool)
