"""A mixture of experts whose experts are cut over the devices of a mesh, for use inside `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import bijax
from bijax.parallel import all_rows, moe_combine, moe_dispatch, own_rows

from ..ops import PLAIN, Ops
from .layers import MoE, QuantMoE
from .layers._dtypes import promote
from .layers.moe import route, tokens, with_shared
from .parallel_cut import Cut, CutLayer


class ParallelMoE(CutLayer, nnx.Module):
    """Experts that are cut over the devices as whole experts, for tokens that all devices have.

    Every device routes all tokens. Then each takes its part of them, sends their rows to the devices of their experts,
    adds what comes back by rank in the top k, and sends the sums to all. No sum is cut. The shared experts are an MLP,
    which is cut like that of other blocks. With `PLAIN` each device adds its own experts' results for all tokens, and
    `jax.lax.psum` adds over the devices.

    Args:
        layer: The layer of one device, whose parameters become this one's.
        cut: How the model is cut.

    Attributes:
        router: (features, num_experts).
        router_bias: (num_experts,), or None.
        gate_up: (num_experts, features, 2 * hidden_features).
        down: (num_experts, hidden_features, features).
        shared: MLP of the shared experts, or None.
        shared_gate: (features, 1), or None.

    Guarantee: row-invariant; the result and the gradients of all parameters have the bits of one device.
    """

    def __init__(self, layer: MoE | QuantMoE, cut: Cut) -> None:
        self.router, self.router_bias = layer.router, layer.router_bias
        self.gate_up, self.down = layer.gate_up, layer.down
        self.shared, self.shared_gate = layer.shared, layer.shared_gate
        self.features, self.routing = layer.features, layer.routing
        self.dtype = layer.dtype
        self.ops: Ops = layer.ops
        self.cut = cut

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., features), the same on all devices, to the same shape."""
        rows, router, gate_up, down = self.operands(x)
        selected, weights = route(self.ops, rows, router, self.router_bias, self.routing)
        run = self._on_own_experts if self.ops is PLAIN else self._dispatched
        y = run(rows, selected, weights, gate_up, down)
        return with_shared(self.ops, y.reshape(x.shape), self.shared, self.shared_gate, x)

    def operands(self, x: jax.Array) -> tuple[jax.Array, jax.Array, Any, Any]:
        """Returns x (..., features) as (T, features), the router and this device's experts in one dtype."""
        rows = tokens("ParallelMoE", x, self.features)
        given = promote(self.dtype, rows, self.router[...], self.gate_up[...], self.down[...])
        rows, router, gate_up, down = given
        return rows, router, gate_up, down

    def first_product(self, rows: jax.Array, gate_up: Any, counts: jax.Array) -> jax.Array:
        """Returns what is inside of this device's experts for rows (A, C) that are sorted by expert.

        Rows after the last expert's are undefined, and nothing reads them.
        """
        return bijax.swiglu(bijax.group_matmul(rows, gate_up, counts, zero_unused=False))

    def second_product(self, inner: jax.Array, down: Any, counts: jax.Array) -> jax.Array:
        """Returns the results of this device's experts (A, C)."""
        return bijax.group_matmul(inner, down, counts, zero_unused=False)

    @property
    def takes_own_rows(self) -> bool:
        """Whether `of_own_rows` serves: the experts are cut as the heads are, and none is shared."""
        return self.shared is None and self.cut.expert_axis is None and type(self) is ParallelMoE

    def of_own_rows(self, x: jax.Array) -> jax.Array:
        """Returns the results for this device's tokens x (R, features), which `bijax.parallel.own_rows` returns."""
        rows, router, gate_up, down = self.operands(x)
        selected, weights = route(self.ops, rows, router, self.router_bias, self.routing)
        return self._of_own(rows, selected, weights, gate_up, down)

    def _dispatched(self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        """Returns the sums (T, C) of the experts' results for tokens x (T, C); see `Ops.experts`."""
        axes, number = self.cut.expert_axes, self.routing.num_experts
        # Rows that fill up the last device's part select no expert.
        own = own_rows(x, axes), own_rows(selected, axes, fill=number), own_rows(weights, axes)
        return all_rows(self._of_own(*own, gate_up, down), axes, number=x.shape[0])

    def _of_own(self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        """Returns the sums for this device's tokens."""
        axes, number = self.cut.expert_axes, self.routing.num_experts
        sent = moe_dispatch(x, selected, axes, num_experts=number, zero_unused=False)
        results = self.second_product(self.first_product(sent.rows, gate_up, sent.counts), down, sent.counts)
        return moe_combine(results, sent, weights, axes)

    def _on_own_experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: Any, down: Any
    ) -> jax.Array:
        axes, own = self.cut.expert_axes, self.gate_up.shape[0]
        local = selected - jax.lax.axis_index(axes) * own
        mine = (local >= 0) & (local < own)
        # Experts of other devices come last, where no product has rows.
        y = self._plain_experts(x, jnp.where(mine, local, own), jnp.where(mine, weights, 0), gate_up, down)
        return jax.lax.psum(y.astype(jnp.float32), axes).astype(x.dtype)

    def _plain_experts(self, *arguments: Any) -> jax.Array:
        return PLAIN.experts(*arguments)

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters that are cut are sharded."""
        experts = PartitionSpec(self.cut.expert_axes, None, None)
        return {"gate_up": experts, "down": experts}
