"""A mixture of experts in int8."""

import jax
from flax import nnx

from ._dtypes import dtype_of
from .moe import MoE, router_products, select_experts, tokens, with_shared
from .quant_linear import QuantizedWeight, quantize_columns


class QuantMoE(nnx.Module):
    """A `MoE` whose experts multiply in int8: rows are quantised as they come, the kernels have been before.

    The router keeps its dtype. Smooth scales are ones.

    Args:
        moe: The layer whose experts are quantised. Its router and shared experts become this one's.

    Attributes:
        router: (features, num_experts) parameter.
        router_bias: (num_experts,) float32 parameter, or None.
        gate_up: (num_experts, features, 2 * hidden_features) int8.
        gate_up_scale: (num_experts, 2 * hidden_features) float32.
        down: (num_experts, hidden_features, features) int8.
        down_scale: (num_experts, features) float32.
        shared: MLP of the shared experts, or None.
        shared_gate: (features, 1) parameter, or None.

    Guarantee: row-invariant with `INVARIANT`, as `MoE`. It has no gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_layers.routing import Routing
        >>> layer = QuantMoE(MoE(4, 8, routing=Routing(num_experts=3, topk=2), rngs=nnx.Rngs(0)))
        >>> layer(jnp.ones((5, 4))).shape, layer.down.dtype.name
        ((5, 4), 'int8')
    """

    def __init__(self, moe: MoE) -> None:
        self.router, self.router_bias = moe.router, moe.router_bias
        self.gate_up, self.gate_up_scale = map(QuantizedWeight, quantize_columns(moe.gate_up[...]))
        self.down, self.down_scale = map(QuantizedWeight, quantize_columns(moe.down[...]))
        self.shared, self.shared_gate = moe.shared, moe.shared_gate
        self.features = moe.features
        self.routing = moe.routing
        self.param_dtype = moe.gate_up.dtype
        self.dtype = moe.dtype
        self.ops = moe.ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features) to the same shape.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `features`.
        """
        dtype = dtype_of(self.dtype, x, self.param_dtype)
        rows = tokens("QuantMoE", x, self.features).astype(dtype)
        logits, gate = router_products(self.ops, rows, self.router[...].astype(dtype), self.shared_gate)
        selected, weights = select_experts(self.ops, logits, self.router_bias, self.routing)
        gate_up, down = (self.gate_up[...], self.gate_up_scale[...]), (self.down[...], self.down_scale[...])
        y = self.ops.quantized_experts(rows, selected, weights, gate_up, down)
        return with_shared(self.ops, y.reshape(x.shape), self.shared, self.shared_gate, x, gate)
