"""Element-wise primitives on whole vectors."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise import tiled


def on_vectors(primitive: Any, *operands: jax.Array, **parameters: Any) -> jax.Array:
    """Applies an element-wise primitive so that every element is computed by the same vector instructions.

    Args:
        primitive: The primitive; it has one result.
        *operands: Its operands, of one shape or of shapes that broadcast to it.
        **parameters: Its parameters.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    operands = tuple(jnp.broadcast_to(x, shape) for x in operands)
    return tiled.elementwise(*operands, program=lambda *vectors: (primitive.bind(*vectors, **parameters),))[0]
