"""Products with 16-bit weights, which are widened to float32 a panel of columns at a time.

A float32 copy of all weights would be written to memory that is new to the process, and read again from there: for the
vocabulary of a small model that takes four times as long as the product. The copy of a panel stays in the cache.
"""

import os
from collections.abc import Callable
from typing import Final

import jax
from jax import lax

from pallas_kernels.matmul.cpu.forms import over_columns
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate

_ELEMENTS_OF_A_CORE: Final = 1 << 17
"""Elements of a panel for each core: half of a second-level cache of 1 MiB."""

_VECTORS: Final = 64


def panel_width(k: int, n: int) -> int:
    """Returns the columns of a panel of weights (K, N): N if all of them fit into the caches of the cores.

    Example:
        >>> panel_width(64, 64)
        64
    """
    most = max(_VECTORS, _ELEMENTS_OF_A_CORE * (os.cpu_count() or 1) // k)
    each = -(-n // -(-n // most))
    return min(n, -(-each // _VECTORS) * _VECTORS)


def widened_in_panels(
    product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, w: jax.Array, width: int, *, transpose_w: bool
) -> jax.Array:
    """Multiplies rows by 16-bit weights. Columns are independent, so the bits are those of one product.

    Args:
        product: Maps x and float32 weights of `width` columns, stored as `w` is, to (M, width).
        x: (M, K) float32.
        w: (K, N), or (N, K) with `transpose_w`.
        width: Columns of a panel, at most N.
        transpose_w: Whether `w` is stored as (N, K).

    Returns:
        (M, N) float32.
    """

    def of_panel(start: jax.Array) -> jax.Array:
        panel = lax.dynamic_slice_in_dim(w, start, width, 0 if transpose_w else 1, **FROM_ZERO)
        return product(x, *isolate(panel.astype(x.dtype)))

    return over_columns(of_panel, x, w.shape[0 if transpose_w else 1], width)
