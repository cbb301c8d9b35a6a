"""The gated multi-layer perceptron."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._initializers import LECUN_NORMAL
from .linear import Linear
from .unrounded import Unrounded, apply_unrounded


class MLP(nnx.Module):
    """Computes down(activation(gate(x)) * up(x)).

    Args:
        features: Length of the last dimension of input and output.
        hidden_features: Hidden width.
        dtype: Dtype of the computation; promoted from input and parameters by default.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the kernels.
        activation: "silu", or "gelu_tanh" for gelu approximated by tanh.
        use_bias: Whether the products have biases.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        gate_up: Linear layer to 2 * hidden_features: the gate's columns, then the up projection's. One kernel, because
            one product is faster than two and columns are independent.
        down: Linear layer back to `features`.

    Raises:
        ValueError: If the activation is not supported.

    Guarantee: row-invariant with `INVARIANT`; the gradients of the kernels as for `Linear`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
        >>> MLP(4, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
        (2, 4)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = LECUN_NORMAL,
        activation: Literal["silu", "gelu_tanh"] = "silu",
        use_bias: bool = False,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"MLP: activation must be 'silu' or 'gelu_tanh', got {activation!r}.")

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                ops=ops,
                rngs=rngs,
            )

        self.gate_up = linear(features, 2 * hidden_features)
        self.down = linear(hidden_features, features)
        self.activation = activation
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features) to the same shape.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `features`.
        """
        return self.down(self._hidden(x))

    def unrounded(self, x: jax.Array) -> jax.Array | Unrounded:
        """Does what a call does, for a result that is added to the residual stream."""
        return apply_unrounded(self.down, self._hidden(x))

    def _hidden(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return (self.ops.swiglu if self.activation == "silu" else self.ops.geglu)(gate, up)
