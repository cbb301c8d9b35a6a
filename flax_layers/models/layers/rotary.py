"""Rotary position embedding: a table of cosines and sines."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..._signature import ConstructorSignature


class RotaryTable(nnx.Variable[jax.Array]):
    """A constant of the model: no parameter, so neither gradients nor optimizers see it by default."""


class RotaryEmbedding(nnx.Module):
    """The cosines and sines that rotate queries and keys at a position.

    They are computed once in float64 and rounded to float32; a position looks its row up, which is exact whatever
    the batch. XLA's own cosine is not the same number in every program.

    A head's columns i and i + head_dim / 2 are a pair. With `rotary_dim` only the first rotary_dim / 2 pairs turn; the
    others have cosine 1 and sine 0. Models that turn the first `rotary_dim` columns of a head have the columns
    reordered by `rotary_order`.

    Args:
        head_dim: Width of a head; even.
        max_positions: Number of positions in the table.
        theta: Base of the frequencies theta**(-2i/head_dim).
        divisors: What each frequency is divided by, (rotary_dim / 2) numbers; None for ones.
        magnitude: Factor of the cosines and sines of pairs that turn.
        rotary_dim: Columns of a head that turn, even; all by default. The frequencies are theta**(-2i/rotary_dim).

    Attributes:
        cos: (max_positions, head_dim / 2) float32 table.
        sin: The same.

    Raises:
        ValueError: If `head_dim` is odd or not positive, `rotary_dim` is odd or not in [2, head_dim], or the numbers of
            divisors and frequencies differ.

    Guarantee: row-invariant.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> cos, sin = RotaryEmbedding(4, 16)(jnp.array([[0, 1, 2]]))
        >>> cos.shape, cos[0, 0].tolist(), sin[0, 0].tolist()
        ((1, 3, 2), [1.0, 1.0], [0.0, 0.0])
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        *,
        theta: float = 10000.0,
        divisors: Sequence[float] | None = None,
        magnitude: float = 1.0,
        rotary_dim: int | None = None,
    ) -> None:
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim must be even and positive, got {head_dim=}.")
        rotated = head_dim if rotary_dim is None else rotary_dim
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even and from 2 to head_dim, got {rotary_dim=} and {head_dim=}."
            )
        frequencies = theta ** (-np.arange(0, rotated, 2) / rotated)
        if divisors is not None:
            if len(divisors) != len(frequencies):
                raise ValueError(
                    f"RotaryEmbedding: expected {len(frequencies)} divisors for {rotated} columns, got {len(divisors)}."
                )
            frequencies = frequencies / np.asarray(divisors, np.float64)
        angles = np.outer(np.arange(max_positions), frequencies)
        still = ((0, 0), (0, (head_dim - rotated) // 2))
        cos, sin = (
            np.pad(magnitude * np.cos(angles), still, constant_values=1),
            np.pad(magnitude * np.sin(angles), still),
        )
        self.cos = RotaryTable(jnp.asarray(cos, jnp.float32))
        self.sin = RotaryTable(jnp.asarray(sin, jnp.float32))
        self.max_positions = max_positions

    def __call__(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the cosines and sines (..., head_dim / 2) of positions (...), integers.

        Positions outside the table get nan, never the row of another position.
        """
        positions = jnp.where(positions < 0, self.max_positions, positions)
        cos, sin = (
            jax.lax.stop_gradient(jnp.take(table[...], positions, axis=0, mode="fill", fill_value=jnp.nan))
            for table in (self.cos, self.sin)
        )
        return cos, sin


def check_angles(layer: str, x: jax.Array, rotary: tuple[jax.Array, jax.Array], rotated: int) -> None:
    """Checks the inputs of a layer of attention.

    Args:
        layer: Name of the layer, for errors.
        x: Its input.
        rotary: Cosines and sines of the tokens' positions.
        rotated: Columns of a head that are rotated.

    Raises:
        ValueError: If x is not (batch, tokens, features), or cosines and sines are not (batch, tokens, rotated / 2).
    """
    if x.ndim != 3:
        raise ValueError(f"{layer}: x must have the shape (batch, tokens, features), got {x.shape}.")
    expected = (*x.shape[:2], rotated // 2)
    if any(angles.shape != expected for angles in rotary):
        raise ValueError(
            f"{layer}: rotary must be a pair of arrays of shape {expected} for x of shape {x.shape},"
            f" got {[angles.shape for angles in rotary]}."
        )


def rotary_order(head_dim: int, rotary_dim: int) -> np.ndarray:
    """Returns the columns of a head of which the first `rotary_dim` turn, in the order of `RotaryEmbedding`'s pairs.

    Scores do not change when queries and keys are reordered alike.

    Args:
        head_dim: Width of a head; even.
        rotary_dim: Columns that turn, in halves; even.

    Example:
        >>> rotary_order(8, 4).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    rotated, still = np.arange(rotary_dim), np.arange(rotary_dim, head_dim)
    halves = zip(np.split(rotated, 2), np.split(still, 2), strict=True)
    return np.concatenate([part for half in halves for part in half])
