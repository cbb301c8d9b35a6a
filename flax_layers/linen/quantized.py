"""Layers in int8: their kernels are variables of the collection "quantized"."""

import contextvars
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import linen

from ..ops import INVARIANT
from .moe import MoE

COLLECTION: Final = "quantized"

type Recorded = dict[tuple[str, ...], list[jax.Array]]

# The inputs of the float layers at a path, while `quantize_variables` runs a model.
recording: contextvars.ContextVar[Recorded | None] = contextvars.ContextVar("recording", default=None)


class QuantDense(linen.Dense):
    """`flax.linen.Dense` in int8: rows are quantised as they come, the kernel has been before.

    It computes what `flax_layers.nnx.QuantLinear` computes. The collection "quantized" has `kernel` (in, out) int8,
    `kernel_scale` (out,) float32 and `smooth_scale` (in,) float32; a bias stays among the parameters. They start with a
    kernel of zeros: `flax_layers.quantize_variables` makes them of the variables of a float model.

    Raises:
        TypeError: If a dtype is not supported.
        ValueError: If there are no quantised variables.

    Guarantee: row-invariant. It has no gradient.

    Example:
        >>> layer, x = QuantDense(2), jnp.ones((3, 4))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> variables["quantized"]["kernel"].dtype.name, layer.apply(variables, x).shape
        ('int8', (3, 2))
    """

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps inputs (..., in) to (..., features)."""
        if _record(self, inputs):
            return super().__call__(inputs)
        features = inputs.shape[-1]
        kernel, scale, smooth = (
            quantized(self, name, shape, dtype)
            for name, shape, dtype in (
                ("kernel", (features, self.features), jnp.int8),
                ("kernel_scale", (self.features,), jnp.float32),
                ("smooth_scale", (features,), jnp.float32),
            )
        )
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else jnp.dtype(self.dtype)
        return INVARIANT.quantized_matmul(
            inputs.astype(dtype), kernel, scale, smooth_scale=smooth, bias=bias, preferred_element_type=dtype
        )


class QuantMoE(MoE):
    """A `MoE` whose experts multiply in int8: rows are quantised as they come, the kernels have been before.

    The router keeps its dtype. The collection "quantized" has `gate_up`, `down`, `shared_gate_up` and `shared_down` in
    int8 and the scales of their columns, `gate_up_scale` and so on.

    Raises:
        TypeError: If a dtype is not supported.
        ValueError: If there are no quantised variables.

    Guarantee: row-invariant with `INVARIANT`, as `MoE`. It has no gradient.

    Example:
        >>> from flax_layers.routing import Routing
        >>> layer, x = QuantMoE(8, routing=Routing(num_experts=3, topk=2)), jnp.ones((5, 4))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (5, 4)
    """

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features) to the same shape."""
        if _record(self, x):
            return super().__call__(x)
        number, features, hidden = self.routing.num_experts, x.shape[-1], self.hidden_features
        gate_up = self._quantized("gate_up", (number, features, 2 * hidden))
        down = self._quantized("down", (number, hidden, features))
        rows, selected, weights = self._route(x)
        y = self.ops.quantized_experts(rows.astype(self._result_type(x)), selected, weights, gate_up, down)
        return self._with_shared(y, x)

    def _shared_product(self, x: jax.Array, name: str, shape: tuple[int, int]) -> jax.Array:
        if recording.get() is not None:
            return super()._shared_product(x, name, shape)
        kernel, scale = self._quantized(name, shape)
        return self.ops.quantized_matmul(x.astype(self._result_type(x)), kernel, scale)

    def _quantized(self, name: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        scales = (*shape[:-2], shape[-1])
        return quantized(self, name, shape, jnp.int8), quantized(self, f"{name}_scale", scales, jnp.float32)

    def _result_type(self, x: jax.Array) -> Any:
        return jnp.result_type(x, self.param_dtype) if self.dtype is None else jnp.dtype(self.dtype)


def quantized(module: linen.Module, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns a quantised variable of a module, zeros or ones while it is initialized.

    Raises:
        ValueError: If it is missing.
    """
    if not module.is_initializing() and not module.has_variable(COLLECTION, name):
        raise ValueError(
            f"{type(module).__name__}: expected {name!r} in the collection {COLLECTION!r} at {'/'.join(module.path)!r},"
            " got variables without it; make them with flax_layers.quantize_variables(model, variables, *inputs)."
        )
    start = jnp.zeros if dtype == jnp.int8 else jnp.ones
    return module.variable(COLLECTION, name, start, shape, dtype).value


def _record(module: linen.Module, x: jax.Array) -> bool:
    """Records a layer's inputs if requested; the layer then computes in floats."""
    recorded = recording.get()
    if recorded is None:
        return False
    recorded.setdefault(module.path, []).append(x)
    return True
