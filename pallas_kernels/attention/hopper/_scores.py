"""What becomes of products of queries and keys before their exponentials: soft cap and slopes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.call import AttentionOptions
from pallas_kernels.attention.hopper.ramp import add_ramp
from pallas_kernels.attention.schedule.hopper import takes_scores
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.hopper.tile import Arithmetic

_LOG2E: Final = math.log2(math.e)


@dataclass(frozen=True)
class Scoring:
    """From a product of a query and a key to its score, in units of ln(2).

    Attributes:
        factor: Factor of products, or of their hyperbolic tangents.
        bend: Factor of products in the tangent; None without a soft cap.
    """

    factor: float
    bend: float | None = None

    @classmethod
    def of(cls, options: AttentionOptions) -> "Scoring":
        """Returns the scoring of a call.

        Raises:
            UnsupportedError: If the kernels do not take the scale or the cap.
        """
        scale, soft_cap = options.scale, options.soft_cap
        if not takes_scores(scale, None):
            raise UnsupportedError(f"attention on a Hopper GPU: expected a scale in [2**-100, 2**100], got {scale}.")
        if not takes_scores(scale, soft_cap):
            raise UnsupportedError(
                "attention on a Hopper GPU: expected a soft cap of at most 1024 with scale / cap in"
                f" [2**-100, 2**100], got {scale=} and {soft_cap=}."
            )
        if soft_cap is None:
            return cls(float(np.float32(scale * _LOG2E)))
        return cls(float(np.float32(soft_cap * _LOG2E)), float(np.float32(2 * _LOG2E * scale / soft_cap)))

    def factor_left(self, added: bool) -> float:
        """Returns the factor that is left to what follows, where a bias or slopes are added and where not."""
        return 1.0 if added else self.factor

    def tangents(self, products: jax.Array, math_: Arithmetic) -> jax.Array:
        """Returns the hyperbolic tangents of products (64, n) float32, or the products where there is no soft cap."""
        return products if self.bend is None else math_.tanh(products, self.bend)

    def biased(self, scores: jax.Array, bias: jax.Array, math_: Arithmetic) -> jax.Array:
        """Returns scores (64, n), without a factor left, of what `tangents` returned and a bias of any float dtype."""
        return math_.fused(scores, self.factor, math_.scaled(bias.astype(jnp.float32), _LOG2E))

    def sloped(
        self,
        scores: jax.Array,
        slope: jax.Array | None,
        start: Callable[[], jax.Array],
        math_: Arithmetic,
        factor: float | None = None,
    ) -> jax.Array:
        """Returns scores (64, n) but for `factor_left`.

        Args:
            scores: (64, n) float32, what `tangents` or `biased` returned.
            slope: (64,) float32, times log2(e), for each step of a column; None without slopes.
            start: Returns the distance that belongs to column 0, (64,) int32.
            math_: The instructions.
            factor: Factor of the scores, by default that of what `tangents` returned.
        """
        factor = self.factor if factor is None else factor
        return scores if slope is None else add_ramp(scores, factor, slope, start(), math_.interpret)


def in_bits(numbers: jax.Array) -> jax.Array:
    """Returns scores or slopes in units of ln(2), float32."""
    return numbers.astype(jnp.float32) * jnp.float32(_LOG2E)
