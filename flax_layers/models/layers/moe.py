"""A mixture of experts."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from ...ops import INVARIANT, Ops
from ...routing import Routing
from ._dtypes import promote
from ._initializers import LECUN_NORMAL, ZEROS
from .mlp import MLP

_MANY_EXPERTS: Final = 64
_EXPERTS = nnx.initializers.lecun_normal(batch_axis=(0,))


class MoE(nnx.Module):
    """SwiGLU experts, some of which a router selects for each token, and shared experts for all tokens.

    Args:
        features: Length of the last dimension of input and output.
        hidden_features: Width inside an expert.
        routing: How experts are selected.
        shared_features: Total hidden width of the shared experts; 0 for none.
        shared_gate: Whether the result of the shared experts is multiplied by sigmoid of a product of the token.
        dtype: Dtype of the computation; promoted from input and parameters by default. Scores and weights are
            float32.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        router: (features, num_experts) parameter.
        router_bias: (num_experts,) float32 parameter used only in the selection, or None.
        gate_up: (num_experts, features, 2 * hidden_features) parameter: the gate's columns, then the up projection's.
        down: (num_experts, hidden_features, features) parameter.
        shared: MLP of the shared experts, or None.
        shared_gate: (features, 1) parameter, or None.

    Raises:
        ValueError: If there is a gate for shared experts, but no shared experts.

    Guarantee: row-invariant with `INVARIANT`: a token's bits do not depend on which tokens its experts get, or on how
    many. Of the gradients of experts see `bijax.group_matmul`.

    Source: Fedus et al., "Switch Transformers", 2022; of the routing see `flax_layers.Routing`.

    Example:
        >>> layer = MoE(4, 8, routing=Routing(num_experts=3, topk=2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 4))).shape
        (2, 5, 4)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        routing: Routing,
        shared_features: int = 0,
        shared_gate: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        if shared_gate and not shared_features:
            raise ValueError("MoE: shared_gate needs shared experts, got shared_features=0.")
        number = routing.num_experts
        self.router = nnx.Param(LECUN_NORMAL(rngs.params(), (features, number), param_dtype))
        self.router_bias: Any = (
            nnx.Param(ZEROS(rngs.params(), (number,), jnp.float32)) if routing.use_bias else nnx.data(None)
        )
        self.gate_up = nnx.Param(_EXPERTS(rngs.params(), (number, features, 2 * hidden_features), param_dtype))
        self.down = nnx.Param(_EXPERTS(rngs.params(), (number, hidden_features, features), param_dtype))
        self.shared: Any = (
            MLP(features, shared_features, dtype=dtype, param_dtype=param_dtype, ops=ops, rngs=rngs)
            if shared_features
            else nnx.data(None)
        )
        self.shared_gate: Any = (
            nnx.Param(LECUN_NORMAL(rngs.params(), (features, 1), param_dtype)) if shared_gate else nnx.data(None)
        )
        self.features = features
        self.routing = routing
        self.dtype = dtype
        self.ops = ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features) to the same shape.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `features`.
        """
        rows = tokens("MoE", x, self.features)
        rows, router, gate_up, down = promote(self.dtype, rows, self.router[...], self.gate_up[...], self.down[...])
        logits, gate = router_products(self.ops, rows, router, self.shared_gate)
        selected, weights = select_experts(self.ops, logits, self.router_bias, self.routing)
        y = self.ops.experts(rows, selected, weights, gate_up, down)
        return with_shared(self.ops, y.reshape(x.shape), self.shared, self.shared_gate, x, gate)


def tokens(layer: str, x: jax.Array, features: int) -> jax.Array:
    """Returns x (..., features) as (T, features).

    Raises:
        ValueError: If its last dimension is wrong.
    """
    if x.shape[-1:] != (features,):
        raise ValueError(f"{layer}: x must have the shape (..., {features}), got {x.shape}.")
    return x.reshape(x.size // max(1, features), features)


def route(ops: Ops, rows: jax.Array, router: jax.Array, bias: Any, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Returns the experts (T, topk) of rows (T, C), and their weights."""
    return select_experts(ops, router_logits(ops, rows, router), bias, routing)


def router_products(ops: Ops, rows: jax.Array, router: jax.Array, gate: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns the router's float32 logits (T, num_experts or more) of rows (T, C), and the gate's product (T, 1).

    Both are computed together where there are few experts: the weights are copied side by side, which takes longer than
    the gate's product where there are many. The gate's product has no gradient, see `shared_outputs`. It is None if
    there is no gate, or it is not computed here.
    """
    number = router.shape[1]
    if gate is None or number >= _MANY_EXPERTS:
        return router_logits(ops, rows, router), None
    y = ops.joined_matmul(rows, router, gate[...].astype(rows.dtype))
    return ops.known_matmul(rows, router, y), y[:, number : number + 1]


def router_logits(ops: Ops, rows: jax.Array, router: jax.Array) -> jax.Array:
    """Returns the router's float32 logits (T, num_experts) of rows (T, C)."""
    return ops.matmul(rows, router, preferred_element_type=jnp.float32)


def select_experts(ops: Ops, logits: jax.Array, bias: Any, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Returns the experts (T, topk) of tokens with these logits, and their weights."""
    return ops.route(logits, None if bias is None else bias[...].astype(jnp.float32), routing)


def with_shared(
    ops: Ops, y: jax.Array, shared: Any, gate: Any, x: jax.Array, known: jax.Array | None = None
) -> jax.Array:
    """Adds the shared experts' outputs for x, times sigmoid of their gate if there is one."""
    return y if shared is None else y + shared_outputs(ops, y.dtype, shared, gate, x, known)


def shared_outputs(
    ops: Ops, dtype: Any, shared: Any, gate: Any, x: jax.Array, known: jax.Array | None = None
) -> jax.Array:
    """Returns the shared experts' outputs for x in a dtype, times sigmoid of their gate if there is one.

    `known` is the gate's product (T, 1) for all tokens, if it was computed before.
    """
    z: jax.Array = shared(x).astype(dtype)
    if gate is None:
        return z
    rows, kernel = promote(dtype, x, gate[...])
    if known is None:
        product = ops.matmul(rows, kernel, preferred_element_type=jnp.float32)
    else:
        product = ops.known_matmul(rows, kernel, known.reshape(*x.shape[:-1], 1))
    return ops.sigmoid_gate(z, product)
