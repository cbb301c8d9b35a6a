"""Programs of ours for primitives whose own programs let elements meet.

Up to JAX 0.11, the continued fraction of the incomplete beta function goes on for all elements until the last one has
converged, and each further step changes bits: an element depends on its neighbours. The loop of one element, mapped
over all, keeps what has converged. Later versions of JAX do so by themselves, and are not changed by that.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from bijax.transform.hook import _jax_private
from bijax.transform.hook._jax_private import Rule


def incomplete_beta(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the regularised incomplete beta function of each element, whose loop ends by itself.

    Args:
        a: Any shape, in a floating dtype.
        b: Of a shape that broadcasts with that of `a`, and the same dtype.
        x: As `b`.
    """
    a, b, x = jnp.broadcast_arrays(a, b, x)
    wide: Any = jnp.promote_types(a.dtype, jnp.float32)
    function = functools.partial(_jax_private.incomplete_beta, dtype=wide)
    for _ in range(a.ndim):
        function = jax.vmap(function)
    return function(*(v.astype(wide) for v in (a, b, x))).astype(a.dtype)


OWN_PROGRAMS: Final[dict[str, Rule]] = {
    "regularized_incomplete_beta": mlir.lower_fun(incomplete_beta, multiple_results=False),
}
"""Rules instead of JAX's for all platforms, by the name of the primitive."""
