"""Convolution of a dilated input (the input gradient of a strided convolution) without multiplying by the holes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_MOST_PHASES: Final = 16

Correlate = Callable[[jax.Array, jax.Array], jax.Array]


def has_phases(holes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> bool:
    """Returns whether the outputs split into phases that each read every second (third, ...) position.

    Args:
        holes: Distance between the elements of the input, along each spatial axis.
        strides: Distance between windows.
        dilation: Distance between the elements of a window.

    Example:
        >>> has_phases((2, 1), (1, 3), (1, 1)), has_phases((1, 1), (1, 3), (1, 1)), has_phases((2, 1), (2, 1), (1, 1))
        (True, False, False)
    """
    hollow = [i for i, n in enumerate(holes) if n > 1]
    return bool(hollow) and math.prod(holes) <= _MOST_PHASES and all(strides[i] == dilation[i] == 1 for i in hollow)


def correlate_in_phases(
    correlate: Correlate,
    x: jax.Array,
    w: jax.Array,
    *,
    counts: Sequence[int],
    before: Sequence[int],
    holes: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    dtype: DTypeLike,
) -> jax.Array:
    """Sums over the elements in the windows, one phase of the outputs after another.

    Args:
        correlate: Maps a padded input and a kernel of these layouts, with these strides and dilation, to
            (N, places..., G, O).
        x: (N, spatial..., G, C), without holes or padding.
        w: (spatial..., C, G, O).
        counts: Number of outputs along each spatial axis.
        before: Zeros before each spatial axis of the input with its holes; may be negative.
        holes: As for `has_phases`, which must be true.
        strides: As for `has_phases`.
        dilation: As for `has_phases`.
        dtype: Dtype of the sums.

    Returns:
        (N, places..., G, O) of `dtype`.
    """
    kernel, shape = w.shape[:-3], x.shape[1:-2]
    size = [-(-n // h) for n, h in zip(counts, holes, strict=True)]
    # Phases that read the same elements, as all do if windows do not overlap, share one product: their weights are
    # additional columns, which do not change the others.
    shared: dict[Any, list[tuple[int, jax.Array]]] = {}
    parts: list[Any] = []
    for phase in itertools.product(*map(range, holes)):
        first = [(low - p) % h for p, low, h in zip(phase, before, holes, strict=True)]
        some = w[tuple(slice(k, None, h) for k, h in zip(first, holes, strict=True))]
        if any(k >= n for k, n in zip(first, kernel, strict=True)):
            parts.append(jnp.zeros((x.shape[0], *size, x.shape[-2], w.shape[-1]), dtype))
            continue
        spans = [
            (m - 1) * s + (k - 1) * d + 1 for m, s, k, d in zip(size, strides, some.shape[:-3], dilation, strict=True)
        ]
        lows = [(low - p - k) // h for p, low, k, h in zip(phase, before, first, holes, strict=True)]
        padding = [(low, span - n - low, 0) for low, span, n in zip(lows, spans, shape, strict=True)]
        shared.setdefault(tuple(padding), []).append((len(parts), some))
        parts.append(None)
    for padding, phases in shared.items():
        padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *padding, (0, 0, 0), (0, 0, 0)])
        y = correlate(padded, lax.concatenate([some for _, some in phases], w.ndim - 1))
        for (place, _), part in zip(phases, jnp.split(y, len(phases), axis=-1), strict=True):
            parts[place] = part
    axes = len(holes)
    y = jnp.stack(parts).reshape(*holes, *parts[0].shape)
    order = [axis for i in range(axes) for axis in (axes + 1 + i, i)]
    y = y.transpose((axes, *order, 2 * axes + 1, 2 * axes + 2))
    y = y.reshape(x.shape[0], *(m * h for m, h in zip(size, holes, strict=True)), x.shape[-2], w.shape[-1])
    return lax.slice(y, (0,) * y.ndim, (x.shape[0], *counts, x.shape[-2], w.shape[-1]))
