"""A linear layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._dtypes import promote
from ._initializers import LECUN_NORMAL, ZEROS


class Linear(nnx.Module):
    """A linear map of the last dimension, as `flax.nnx.Linear`, with the operations as an argument.

    Args:
        in_features: Length of the last dimension of the input.
        out_features: Length of the last dimension of the output.
        use_bias: Whether to add a bias.
        dtype: Dtype of the computation; promoted from input and parameters by default.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.dot_general`.
        kernel_init: Initializer of the kernel.
        bias_init: Initializer of the bias.
        preferred_element_type: Dtype of the result; the computation's by default.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        kernel: (in_features, out_features) parameter.
        bias: (out_features,) parameter, or None.

    Guarantee: row-invariant with `INVARIANT`; the gradients of kernel and bias are split-invariant for cuts of the
    rows at multiples of 128, see `bijax.matmul`.

    Example:
        >>> layer = Linear(3, 2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((5, 3))).shape
        (5, 2)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = LECUN_NORMAL,
        bias_init: nnx.Initializer = ZEROS,
        preferred_element_type: Any = None,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias: Any = (
            nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else nnx.data(None)
        )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.precision = precision
        self.preferred_element_type = preferred_element_type
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., in_features) to (..., out_features).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `in_features`.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"Linear: x must have the shape (..., {self.in_features}), got {x.shape};"
                f" the layer maps {self.in_features} features to {self.out_features}."
            )
        x, kernel, bias = promote(self.dtype, x, self.kernel[...], None if self.bias is None else self.bias[...])
        return self.ops.matmul(
            x, kernel, bias=bias, precision=self.precision, preferred_element_type=self.preferred_element_type
        )
