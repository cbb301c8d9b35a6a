"""Sums of a few whole arrays as a fixed binary tree, with one rounding."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import TreeContract, add_as_tree, honour
from pallas_kernels.parts.xla.lanes import run_flat


def tree_sum(terms: jax.Array, *, out_dtype: str, contract: TreeContract) -> jax.Array:
    """Adds arrays element by element.

    Args:
        terms: (n, ...) arrays to add, of a floating dtype.
        out_dtype: Name of the result's dtype.
        contract: The order of the sum.

    Returns:
        The sum, of shape (...), computed in at least float32 and rounded once.

    Guarantee: row-invariant, each element being a row of its own.

    Example:
        >>> tree_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]]), out_dtype="bfloat16", contract=TreeContract()).tolist()
        [4.0, 6.0]
    """
    honour("tree_sum", contract, TreeContract())
    if terms.size == 0:
        return jnp.zeros(terms.shape[1:], out_dtype)

    def program(*arrays: jax.Array) -> tuple[jax.Array]:
        return (_add(arrays, out_dtype),)

    return run_flat(program, *terms)[0]


def tree_sum_on_gpu(terms: jax.Array, *, out_dtype: str, contract: TreeContract) -> jax.Array:
    """Adds arrays element by element: fences in the lowering preserve the bits in any fusion."""
    honour("tree_sum", contract, TreeContract())
    if len(terms) == 1 and terms.dtype == out_dtype:
        return terms[0]  # nothing is added or rounded: no barrier, for which XLA may copy the array
    # Without the barrier XLA may drop the rounding before a conversion to float32.
    return lax.optimization_barrier(_add(tuple(terms), out_dtype))


def _add(arrays: tuple[jax.Array, ...], out_dtype: str) -> jax.Array:
    wide = jnp.promote_types(arrays[0].dtype, jnp.float32)
    total: jax.Array = add_as_tree(lambda i: arrays[i].astype(wide), len(arrays))
    return total.astype(out_dtype)
