"""The boundary between an invariant function and the code around it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def fenced(tree: Any) -> Any:
    """Returns the same values, behind a barrier where they are traced floating-point arrays.

    Without it XLA:CPU could contract a product computed outside with a sum inside, or the other way round; in reverse
    mode the barriers stand between the cotangents in the same way. Values in containers other than tuples, lists and
    dicts are left alone: rebuilding a module would break the references that others hold to it.
    """
    if isinstance(tree, jax.core.Tracer) and jnp.issubdtype(tree.dtype, jnp.floating):
        return lax.optimization_barrier((tree,))[0]
    if type(tree) is dict:
        return {key: fenced(value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(fenced(value) for value in tree)
    return tree
