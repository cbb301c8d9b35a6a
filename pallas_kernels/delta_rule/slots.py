"""What sequences keep, in slots: a call continues the sequences of some slots, and leaves the others alone.

Of T, which is lower triangular, the zeros are not stored. A state at the edge 0 is zero, whatever its slot holds.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]


def in_slots(
    extend: Callable[..., Arrays], kept: Arrays, edge: jax.Array, lengths: jax.Array, slots: jax.Array
) -> Arrays:
    """Continues sequences in slots by a function of copies of what they keep, which are written back.

    Args:
        extend: Maps state, keys, residuals, T, G and edges of sequences (B, ...) to the outputs and new ones.
        kept: State, keys, residuals, T as `packed`, and G, (S, ...).
        edge: (B,) int32.
        lengths: (B,) int32; nothing is written for sequences without tokens.
        slots: (B,) int32, different ones but for sequences without tokens.

    Returns:
        The outputs, the arrays of `kept`, and the edges (B,).
    """
    y, *new, after = extend(*taken(kept, edge, slots), edge)
    return y, *put_back(kept, tuple(new), lengths, slots), after


def taken(kept: Arrays, edge: jax.Array, slots: jax.Array) -> Arrays:
    """Returns what sequences in `slots` keep; any if a slot is out of range."""
    state, key, residual, triangle, decay = (jnp.take(a, slots, axis=0, mode="clip") for a in kept)
    return jnp.where((edge == 0)[:, None, None, None], 0, state), key, residual, unpacked(triangle), decay


def put_back(kept: Arrays, new: Arrays, lengths: jax.Array, slots: jax.Array) -> Arrays:
    """Returns the slots with what sequences keep now; of sequences without tokens it is dropped."""
    state, key, residual, inverse, decay = new
    at = jnp.where(lengths > 0, slots, kept[0].shape[0])
    found = zip(kept, (state, key, residual, packed(inverse), decay), strict=True)
    return tuple(a.at[at].set(x, mode="drop") for a, x in found)


def packed(matrices: Any) -> jax.Array:
    """Returns lower triangular matrices (..., N, N) as (..., N / 2, N + 1), without the zeros; N is even.

    Row r holds row N / 2 + r, of N / 2 + r + 1 numbers, and then row N / 2 - 1 - r backwards, of N / 2 - r numbers.

    Example:
        >>> packed(jnp.array([[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]])).tolist()
        [[4, 5, 6, 3, 2], [7, 8, 9, 10, 1]]
    """
    half = matrices.shape[-1] // 2
    upper, lower = matrices[..., :half, :], matrices[..., half:, :]
    none = [(0, 0)] * (matrices.ndim - 1)
    upper, lower = jnp.pad(upper[..., ::-1, ::-1], [*none, (1, 0)]), jnp.pad(lower, [*none, (0, 1)])
    return jnp.where(_is_lower(half), lower, upper)


def unpacked(triangles: jax.Array) -> jax.Array:
    """Returns the matrices (..., N, N) of `packed`, with zeros above the diagonals.

    Example:
        >>> unpacked(jnp.array([[4, 5, 6, 3, 2], [7, 8, 9, 10, 1]])).tolist()
        [[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]]
    """
    lower = _is_lower(triangles.shape[-2])
    of_lower, of_upper = jnp.where(lower, triangles, 0)[..., :-1], jnp.where(lower, 0, triangles)[..., 1:]
    return jnp.concatenate([of_upper[..., ::-1, ::-1], of_lower], axis=-2)


def _is_lower(half: int) -> Any:
    """Returns which numbers of `packed` are of the lower half of the rows, (N / 2, N + 1)."""
    row, column = jnp.arange(half)[:, None], jnp.arange(2 * half + 1)
    return column <= half + row
