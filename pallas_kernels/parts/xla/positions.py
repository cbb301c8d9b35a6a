"""Iteration over the positions of a window, in a fixed order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.xla.tiles import isolate

_UNROLL: Final = 16


@dataclass(frozen=True)
class Window:
    """A window that slides over an already padded array.

    Attributes:
        size: Elements along each axis.
        strides: Distance between windows.
        dilation: Distance between elements of a window.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> int:
        """Elements of a window."""
        return math.prod(self.size)

    def counts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of windows along each axis of an array.

        Example:
            >>> Window((3,), (2,), (1,)).counts((8,))
            (3,)
        """
        spans = ((w - 1) * d + 1 for w, d in zip(self.size, self.dilation, strict=True))
        return tuple(
            max(0, (n - span) // stride + 1) for n, span, stride in zip(shape, spans, self.strides, strict=True)
        )

    def starts(self, position: Any) -> tuple[Any, ...]:
        """Returns the indices of a position (in row-major order) in the first window.

        Args:
            position: An int, a NumPy array, or a traced array; not negative.
        """
        found = []
        zero = jnp.zeros_like(position) if isinstance(position, jax.Array) else 0
        for size, dilation in zip(reversed(self.size), reversed(self.dilation), strict=True):
            if size == 1:
                found.append(zero)
                continue
            position, within = split_index(position, size)
            found.append(within * dilation)
        return tuple(reversed(found))

    def read(self, x: jax.Array, position: Any) -> jax.Array:
        """Returns the elements at one position of all windows."""
        counts, starts = self.counts(x.shape), self.starts(position)
        spans = tuple((n - 1) * s + 1 for n, s in zip(counts, self.strides, strict=True))
        if not isinstance(position, jax.Array):
            return lax.slice(x, starts, tuple(map(int.__add__, starts, spans)), self.strides)
        some = lax.dynamic_slice(x, starts, spans, allow_negative_indices=False)
        return lax.slice(some, (0,) * x.ndim, spans, self.strides)


def split_index(index: Any, size: int) -> tuple[Any, Any]:
    """Returns `index // size` and `index % size` of a non-negative index.

    JAX's own operators handle signs, which adds a kernel's worth of operations to compile.

    Example:
        >>> split_index(7, 3)
        (2, 1)
    """
    if isinstance(index, jax.Array):
        divisor = jnp.full(index.shape, size, index.dtype)
        return lax.div(index, divisor), lax.rem(index, divisor)
    return index // size, index % size


def fold_positions[T](step: Callable[[T, Any], T], first: T, start: int, positions: int) -> T:
    """Applies `step` to the positions from `start` on, in ascending order."""
    whole = (positions - start) // _UNROLL if positions - start > _UNROLL else 0

    def group(i: jax.Array, state: T) -> T:
        for k in range(_UNROLL):
            state = step(state, np.int32(start) + i * _UNROLL + k)
        return jax.tree.map(lambda a: isolate(a)[0], state)

    if whole:
        first = lax.fori_loop(jnp.int32(0), jnp.int32(whole), group, first)
    for k in range(start + whole * _UNROLL, positions):
        first = step(first, k)
    return first
