"""Root-mean-square normalisation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._dtypes import promote
from .unrounded import Unrounded, rounded


class RMSNorm(nnx.Module):
    """Divides each row by its root mean square and scales it, as `flax.nnx.RMSNorm` over the last dimension.

    Args:
        num_features: Length of the last dimension.
        epsilon: Added to the mean square.
        use_scale: Whether to scale the columns.
        dtype: Dtype of the result; promoted from input and parameters by default.
        param_dtype: Dtype of the scale.
        scale_init: Initializer of the scale; by default it starts so that nothing is scaled.
        scale_offset: Added to the scale; 1 for models that store scale - 1, as Gemma does.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        scale: (num_features,) parameter, or None.

    Guarantee: row-invariant with `INVARIANT`; the gradient of the scale is split-invariant for cuts of the rows at
    multiples of 128, see `bijax.rms_norm`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Example:
        >>> RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, 3.0]])).tolist()
        [[1.0, 1.0]]
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        scale_init: nnx.Initializer | None = None,
        scale_offset: float = 0.0,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        scale_init = nnx.initializers.constant(1 - scale_offset) if scale_init is None else scale_init
        self.scale: Any = (
            nnx.Param(scale_init(rngs.params(), (num_features,), param_dtype)) if use_scale else nnx.data(None)
        )
        self.num_features = num_features
        self.epsilon = epsilon
        self.scale_offset = scale_offset if use_scale else 0.0
        self.dtype = dtype
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the rows of x (..., num_features).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `num_features`.
        """
        x, scale = self._promoted(x)
        return self.ops.rms_norm(x, scale, eps=self.epsilon, weight_offset=self.scale_offset)

    def add(self, x: jax.Array, residual: jax.Array | Unrounded) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of x and residual (..., num_features), and this norm of it.

        An `Unrounded` residual is rounded to the dtype of x first.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension is not `num_features`, or the shapes differ.
        """
        wide, scale = self._promoted(x)
        if isinstance(residual, Unrounded) and x.dtype == wide.dtype:
            added = residual.sum  # rounded by the norm's kernel
        else:
            added = rounded(residual, x.dtype)
            if not x.dtype == added.dtype == wide.dtype:
                x = x + added
                return x, self(x)
        return self.ops.add_rms_norm(x, added, scale, eps=self.epsilon, weight_offset=self.scale_offset)

    def _promoted(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if x.shape[-1:] != (self.num_features,):
            raise ValueError(f"RMSNorm: x must have the shape (..., {self.num_features}), got {x.shape}.")
        wide, scale = promote(self.dtype, x, None if self.scale is None else self.scale[...])
        return wide, scale
