"""A mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from ..models.layers._dtypes import promote
from ..models.layers.moe import route, tokens
from ..ops import INVARIANT, Ops
from ..routing import Routing

_KERNEL = linen.initializers.lecun_normal()
_KERNELS = linen.initializers.lecun_normal(batch_axis=(0,))
_ZEROS = linen.initializers.zeros_init()


class MoE(linen.Module):
    """SwiGLU experts, some of which a router selects for each token, and shared experts for all tokens.

    It computes what `flax_layers.nnx.MoE` computes, with parameters of the same names and shapes; the shared experts'
    are `shared_gate_up` and `shared_down`.

    Args:
        hidden_features: Width inside an expert.
        routing: How experts are selected.
        shared_features: Total hidden width of the shared experts; 0 for none.
        dtype: Dtype of the computation; promoted from input and parameters by default. Scores and weights are
            float32.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.

    Guarantee: row-invariant with `INVARIANT`: a token's bits do not depend on which tokens its experts get, or on how
    many. Of the gradients of experts see `bijax.group_matmul`.

    Example:
        >>> layer, x = MoE(8, routing=Routing(num_experts=3, topk=2)), jnp.ones((2, 5, 4))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 5, 4)
    """

    hidden_features: int
    routing: Routing
    shared_features: int = 0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    ops: Ops = INVARIANT

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features) to the same shape.

        Raises:
            TypeError: If a dtype is not supported.
        """
        rows, selected, weights = self._route(x)
        gate_up, down = self._kernels(x.shape[-1])
        rows, gate_up, down = promote(self.dtype, rows, gate_up, down)
        return self._with_shared(self.ops.experts(rows, selected, weights, gate_up, down), x)

    def _kernels(self, features: int) -> tuple[jax.Array, jax.Array]:
        number, hidden = self.routing.num_experts, self.hidden_features
        return (
            self.param("gate_up", _KERNELS, (number, features, 2 * hidden), self.param_dtype),
            self.param("down", _KERNELS, (number, hidden, features), self.param_dtype),
        )

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tokens (T, C), and the experts (T, topk) of each with their weights."""
        number = self.routing.num_experts
        router = self.param("router", _KERNEL, (x.shape[-1], number), self.param_dtype)
        bias = self.param("router_bias", _ZEROS, (number,), jnp.float32) if self.routing.use_bias else None
        rows, router = promote(self.dtype, tokens("MoE", x, x.shape[-1]), router)
        return rows, *route(self.ops, rows, router, bias, self.routing)

    def _with_shared(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Adds the shared experts' outputs for x to the experts' rows y (T, C)."""
        y, features, hidden = y.reshape(x.shape), x.shape[-1], self.shared_features
        if not hidden:
            return y
        gate, up = jnp.split(self._shared_product(x, "shared_gate_up", (features, 2 * hidden)), 2, axis=-1)
        shared = self._shared_product(self.ops.swiglu(gate, up), "shared_down", (hidden, features))
        return y + shared.astype(y.dtype)

    def _shared_product(self, x: jax.Array, name: str, shape: tuple[int, int]) -> jax.Array:
        x, kernel = promote(self.dtype, x, self.param(name, _KERNEL, shape, self.param_dtype))
        return self.ops.matmul(x, kernel)
