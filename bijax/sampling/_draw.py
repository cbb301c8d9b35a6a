"""Drawing tokens: the first of the largest logits, with noise where the temperature is above 0."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_if_served
from bijax.sampling._arithmetic import Arithmetic, element
from bijax.sampling._noise import perturb
from bijax.sampling._order import first_largest
from pallas_kernels.target import Target


def draw(
    logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array, arithmetic: Arithmetic
) -> jax.Array:
    """Returns a token (R,) int32 for each row of logits (R, V); -1 for a row with a nan or with nothing but -inf."""
    if arithmetic.invariant:
        return _kernel(logits, temperature, seeds, positions)[0]
    return _anywhere(logits, temperature, seeds, positions, arithmetic)


def scores_of(logits: jax.Array, temperature: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Returns logits (R, V) divided by temperatures (R,), of which the largest of each row is 0."""
    return arithmetic.each(_scale, logits, jnp.max(logits, axis=-1, keepdims=True), temperature[:, None])


def _anywhere(
    logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array, arithmetic: Arithmetic
) -> jax.Array:
    drawing = temperature[:, None] > 0

    def noisy(logits: jax.Array) -> jax.Array:
        perturbed = perturb(scores_of(logits, temperature, arithmetic), seeds, positions, arithmetic)
        return jnp.where(drawing, perturbed, logits)

    return first_largest(lax.cond(drawing.any(), noisy, lambda logits: logits, logits))


_WIDE: Final = 1 << 14
"""Columns from which a CPU draws row by row, so that a row at temperature 0 costs no noise."""


def _draw(target: Target, *arrays: jax.Array) -> Arrays:
    tokens = run_if_served("draw", target, None, *arrays, like=lambda *arrays: _shapes(*arrays)[0])
    return _composed(*arrays) if tokens is None else (tokens,)


def _composed(logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> Arrays:
    if logits.shape[1] < _WIDE:
        return (_anywhere(logits, temperature, seeds, positions, Arithmetic()),)

    def one(row: Arrays) -> jax.Array:
        logits, temperature, seeds, positions = (x[None] for x in row)
        return _anywhere(logits, temperature, seeds, positions, Arithmetic())[0]

    tokens: jax.Array = lax.map(one, (logits, temperature, seeds, positions))
    return (tokens,)


def _shapes(logits: jax.Array, *_: jax.Array) -> Arrays:
    return (jnp.zeros(logits.shape[0], jnp.int32),)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], _: dict[str, Any]) -> Arrays:
    return unfold_rows(size, _kernel(*fold_rows(size, arrays, axes)))


_kernel = define_kernel("draw", _draw, _fold, _shapes)


@element
def _scale(x: jax.Array, largest: jax.Array, temperature: jax.Array) -> jax.Array:
    """Scores whose largest is 0; nan where the largest is nan. Rows at temperature 0 are ignored."""
    scaled = (x - largest) / jnp.where(temperature > 0, temperature, np.float32(1))
    nothing = np.float32(-np.inf)
    return jnp.where(x == nothing, nothing, jnp.where(x == largest, np.float32(0), scaled))
