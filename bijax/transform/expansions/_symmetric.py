"""Products of matrices with their own transposes."""

from typing import Any

import jax

from bijax.transform.expansions._stacks import matmul, over_stack


def symmetric_product(a: jax.Array, c: jax.Array, *, alpha: float, beta: float, **_: Any) -> jax.Array:
    """Computes alpha a aᵀ + beta c, as `jax.lax.linalg.symmetric_product` does, the upper triangles too."""
    return over_stack(lambda a, c: alpha * matmul(a, a.T) + beta * c, a, c)  # type: ignore[no-any-return]
