"""A linear layer in int8."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

import bijax

from ...ops import INVARIANT, Ops
from ._dtypes import dtype_of


class QuantizedWeight(nnx.Variable[jax.Array]):
    """An array of a quantised layer: no parameter, so neither gradients nor optimizers see it by default."""


class QuantLinear(nnx.Module):
    """A linear map of the last dimension in int8: rows are quantised as they come, the kernel has been before.

    With h = x * smooth_scale, and both h and the kernel / smooth_scale[:, None] rounded to int8 by their rows and
    columns, it is the product of the two; see `bijax.scale_dynamic_quant` and `bijax.quant_matmul`. Layers start with
    zeros: create one from an existing kernel with `from_kernel` or `flax_layers.convert(model, quantize="int8")`.

    Args:
        in_features: Length of the last dimension of the input.
        out_features: Length of the last dimension of the output.
        use_bias: Whether to add a bias.
        use_smooth_scale: Whether the input is multiplied by a vector first.
        dtype: Dtype of the result; promoted from input and `param_dtype` by default.
        param_dtype: Dtype of the bias, and of the kernel that is quantised.
        preferred_element_type: Dtype of the result, before `dtype`.
        ops: The operations to compute with.

    Attributes:
        weight: (in_features, out_features) int8.
        weight_scale: (out_features,) float32.
        smooth_scale: (in_features,) float32, or None.
        bias: (out_features,), or None.

    Guarantee: row-invariant with `INVARIANT`. It has no gradient.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    2022.

    Example:
        >>> layer = QuantLinear.from_kernel(jnp.array([[1.0, 4.0], [-2.0, 8.0]]))
        >>> layer.weight[...].tolist(), layer(jnp.array([[1.0, 0.0]])).shape
        ([[64, 64], [-127, 127]], (1, 2))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        use_smooth_scale: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        preferred_element_type: Any = None,
        ops: Ops = INVARIANT,
    ) -> None:
        self.weight = QuantizedWeight(jnp.zeros((in_features, out_features), jnp.int8))
        self.weight_scale = QuantizedWeight(jnp.ones((out_features,), jnp.float32))
        self.smooth_scale: Any = (
            QuantizedWeight(jnp.ones((in_features,), jnp.float32)) if use_smooth_scale else nnx.data(None)
        )
        self.bias: Any = QuantizedWeight(jnp.zeros((out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.preferred_element_type = preferred_element_type
        self.ops = ops

    @classmethod
    def from_kernel(
        cls,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        *,
        smooth_scale: jax.Array | None = None,
        dtype: Any = None,
        preferred_element_type: Any = None,
        ops: Ops = INVARIANT,
    ) -> Self:
        """Returns the layer of a kernel.

        Args:
            kernel: (in_features, out_features) float32, bfloat16 or float16. A column with an inf or nan makes nan.
            bias: (out_features,), or None.
            smooth_scale: (in_features,) positive numbers that the input is multiplied by, or None for ones.
            dtype: As for the constructor.
            preferred_element_type: As for the constructor.
            ops: The operations to compute with.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the shapes do not fit.
        """
        kernel = jnp.asarray(kernel)
        if kernel.ndim != 2:
            raise ValueError(f"QuantLinear: kernel must have the shape (in, out), got {kernel.shape}.")
        layer = cls(
            *kernel.shape,
            use_bias=bias is not None,
            use_smooth_scale=smooth_scale is not None,
            dtype=dtype,
            param_dtype=kernel.dtype,
            preferred_element_type=preferred_element_type,
            ops=ops,
        )
        weight, scale = quantize_columns(kernel, smooth_scale)
        layer.weight.set_value(weight)
        layer.weight_scale.set_value(scale)
        for variable, value in ((layer.smooth_scale, smooth_scale), (layer.bias, bias)):
            if value is None:
                continue
            if jnp.shape(value) != variable.shape:
                raise ValueError(
                    f"QuantLinear: expected a vector of shape {variable.shape} for the kernel of shape {kernel.shape},"
                    f" got {jnp.shape(value)}."
                )
            variable.set_value(jnp.asarray(value, variable.dtype))
        return layer

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., in_features) to (..., out_features).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `in_features`.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"QuantLinear: x must have the shape (..., {self.in_features}), got {x.shape};"
                f" the layer maps {self.in_features} features to {self.out_features}."
            )
        bias = None if self.bias is None else self.bias[...]
        return quant_product(self, x, self.weight[...], self.weight_scale[...], bias)


def quant_product(layer: Any, x: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns the product of a layer of int8, with its operations and dtypes.

    Args:
        layer: A `QuantLinear`, or a layer with its attributes.
        x: (..., in).
        weight: (in, out) int8.
        scale: (out,) float32.
        bias: (out,), or None.
    """
    dtype = dtype_of(layer.dtype, x, layer.param_dtype)
    return layer.ops.quantized_matmul(
        x.astype(dtype),
        weight,
        scale,
        smooth_scale=None if layer.smooth_scale is None else layer.smooth_scale[...],
        bias=bias,
        preferred_element_type=dtype if layer.preferred_element_type is None else layer.preferred_element_type,
    )


@jax.jit
def quantize_columns(kernel: jax.Array, smooth_scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantises the columns of a kernel (..., in, out) whose input is multiplied by `smooth_scale` (..., in) first.

    Returns:
        (..., in, out) int8 and the scales (..., out) float32.

    Example:
        >>> quantize_columns(jnp.array([[2.0], [127.0]]))[0].tolist()
        [[2], [127]]
    """
    kernel = kernel.astype(jnp.float32)
    if smooth_scale is not None:
        kernel = kernel / jnp.asarray(smooth_scale, jnp.float32)[..., None]
    weight, scale = bijax.scale_dynamic_quant(jnp.swapaxes(kernel, -1, -2))
    return jnp.swapaxes(weight, -1, -2), scale
