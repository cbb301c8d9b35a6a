"""Scatters that combine windows of updates into an array, for all targets in parallel: for a GPU."""

import jax

from pallas_kernels.contract import FoldContract, honour
from pallas_kernels.parts.xla.lanes import Combine
from pallas_kernels.parts.xla.rounds import fold_windows
from pallas_kernels.scatter.portable import scatter_windows


def scatter_rounds(
    x: jax.Array,
    starts: jax.Array,
    inside: jax.Array,
    updates: jax.Array,
    *,
    combine: Combine,
    contract: FoldContract,
) -> jax.Array:
    """Combines each window of updates with the part of `x` at its start, in ascending order for each element.

    Windows that may overlap partially are combined sequentially, as by `scatter_windows`.

    Args:
        x: Array of any shape, float32, bfloat16, float16 or float64.
        starts: (M, rank of x) int32, where the windows start.
        inside: (M,) bool, which windows to apply; the others are ignored.
        updates: (M, ...) of the dtype of `x`, windows of the rank of `x`.
        combine: One correctly rounded operation on the elements of `x` and of a window.
        contract: Order of the operations.

    Returns:
        An array of the shape and dtype of `x`.

    Guarantee: an element depends on the updates that meet it alone, and on their order; the bits are those of
    `scatter_windows`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> starts, inside = jnp.array([[2], [0], [2]]), jnp.array([True, True, True])
        >>> updates = jnp.array([[1.0], [2.0], [4.0]])
        >>> along = {"combine": lax.add, "contract": FoldContract("scatter")}
        >>> scatter_rounds(jnp.zeros(3), starts, inside, updates, **along).tolist()
        [2.0, 0.0, 5.0]
    """
    honour("scatter", contract, FoldContract("scatter"))
    if 0 in x.shape or 0 in updates.shape:
        return x
    if not all(n in (1, size) for n, size in zip(updates.shape[1:], x.shape, strict=True)):
        return scatter_windows(x, starts, inside, updates, combine=combine, contract=contract)
    return fold_windows(x, starts, inside, updates, combine)
