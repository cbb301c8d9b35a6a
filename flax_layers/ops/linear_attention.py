"""The operations of linear attention, of output gates and of gated experts."""

from typing import Any

import jax
import jax.numpy as jnp

import bijax
from bijax.ops.delta_rule.conv_heads import conv_heads, conv_heads_extend
from bijax.ops.norm.gated import gated_heads
from pallas_kernels.causal_conv.heads import Heads


class LinearAttentionOps:
    """What layers with a state per sequence need beyond the operations of attention; part of `Ops`."""

    def sigmoid_gate(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns x times sigmoid(gate), element by element, in the dtype of x; gate is broadcast."""
        return _sigmoid_gate(x, gate)

    def causal_conv(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns silu of the causal depthwise convolution of x (B, T, C) with weight (C, W)."""
        return bijax.causal_conv1d(x, weight, activation="silu")

    def causal_conv_extend(
        self,
        x: jax.Array,
        weight: jax.Array,
        inputs: jax.Array,
        *,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The same for tokens of sequences whose last inputs are in `inputs` (B, S, C), by position mod S.

        The first token of x has the position start (B,), and the first lengths (B,) tokens count. With `slots` (B,) the
        inputs of sequence b are at slots[b], else at b. Returns the result and the new inputs.
        """
        places: dict[str, Any] = {"start": start, "lengths": lengths, "slots": slots}
        return bijax.causal_conv1d_extend(x, weight, state=inputs, activation="silu", **places)

    def conv_heads(self, x: jax.Array, weight: jax.Array, heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values (B, T, heads, width): `causal_conv` of the first channels of x.

        Queries and keys are divided by their lengths, as `l2_norm` does.
        """
        return conv_heads(x, weight, heads)

    def conv_heads_extend(
        self,
        x: jax.Array,
        weight: jax.Array,
        inputs: jax.Array,
        heads: Heads,
        *,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        """The same for tokens of sequences, as `causal_conv_extend`. Returns the three, and the new inputs."""
        places: dict[str, Any] = {"start": start, "lengths": lengths, "slots": slots}
        return conv_heads_extend(x, weight, heads, state=inputs, **places)

    def delta_gates(
        self, b: jax.Array, a: jax.Array, a_log: jax.Array, dt_bias: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), (B, T, H) float32.

        beta is rounded to the dtype of b, as models are trained.
        """
        g, beta = _delta_gates(b, a, a_log, dt_bias)
        return g, beta

    def l2_norm(self, x: jax.Array) -> jax.Array:
        """Divides the rows of x (..., C) by their lengths."""
        return bijax.l2_norm(x)

    def gated_rms_norm(self, x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        """Divides the rows of x (..., C) by their root mean square, times weight (C,) and silu(gate)."""
        return bijax.gated_rms_norm(x, gate, weight, eps=eps)

    def gated_heads(self, x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        """Returns `gated_rms_norm` of heads (B, T, H, V), whose gates are the last H V columns of gate (B, T, ...)."""
        return gated_heads(x, gate, weight, eps=eps)

    def gated_delta_rule(
        self, query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array
    ) -> jax.Array:
        """Returns what `bijax.gated_delta_rule` computes, over whole sequences."""
        return bijax.gated_delta_rule(query, key, value, g, beta)[0]

    def gated_delta_rule_extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        g: jax.Array,
        beta: jax.Array,
        *,
        state: bijax.DeltaRuleState,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, bijax.DeltaRuleState]:
        """Returns what `bijax.gated_delta_rule_extend` computes."""
        places: dict[str, Any] = {"start": start, "lengths": lengths, "slots": slots}
        return bijax.gated_delta_rule_extend(query, key, value, g, beta, state=state, **places)


@bijax.elementwise
def _sigmoid_gate(x: jax.Array, gate: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


def _gates(b: jax.Array, a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    beta = jax.nn.sigmoid(b.astype(jnp.float32)).astype(b.dtype).astype(jnp.float32)
    x = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    softplus = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return -jnp.exp(a_log.astype(jnp.float32)) * softplus, beta


_delta_gates: Any = bijax.elementwise(_gates)
