"""Linear attention whose heads are cut over the devices of a mesh, for use inside `jax.shard_map`."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import bijax

from ..ops import PLAIN
from .layers import DeltaNetSlots, DeltaNetState, GatedDeltaNet
from .layers.delta_net_state import STATE_INTERVAL, DeltaNetSnapshot
from .parallel_cut import Cut, CutLayer
from .parallel_heads import by_heads
from .parallel_layers import grouped, ungrouped
from .parallel_linear import column_parallel_layer, row_parallel_layer


class ParallelGatedDeltaNet(CutLayer, GatedDeltaNet):
    """Linear attention by the gated delta rule whose heads are cut over the devices.

    Each device has some key heads and the value heads that share them: their columns, channels of the convolution,
    gates and states. No sum is cut but that of the output projection.

    Args:
        layer: The layer of one device, whose parameters become this one's.
        cut: How the model is cut; its devices divide the key heads.

    Attributes:
        qkvz: Cut by columns, in groups of [queries | keys | values | z].
        ba: Cut by columns, in groups of [b | a].
        conv: (channels, conv_width), cut by channels, in groups of [queries | keys | values].
        a_log: (num_value_heads,), cut by heads.
        dt_bias: (num_value_heads,), cut by heads.
        norm_scale: (value_dim,).
        out: Cut by rows.

    Guarantee: row-invariant; the result and the gradients of all parameters have the bits of one device of the mesh.
    """

    def __init__(self, layer: GatedDeltaNet, cut: Cut) -> None:
        keys, values = layer.num_key_heads * layer.key_dim, layer.num_value_heads * layer.value_dim
        self.parts = (keys, keys, values)
        self.cut = cut
        self.heads_cut = cut.of_heads(layer.num_value_heads)
        self.qkvz: Any = column_parallel_layer(layer.qkvz, (*self.parts, values), cut)
        self.ba: Any = column_parallel_layer(layer.ba, (layer.num_value_heads,) * 2, self.heads_cut)
        self.conv = nnx.Param(self._stored_channels(layer.conv[...]))
        self.a_log, self.dt_bias, self.norm_scale = layer.a_log, layer.dt_bias, layer.norm_scale
        self.out: Any = row_parallel_layer(layer.out, cut)
        self.channels = layer.channels // cut.devices
        self.num_key_heads = layer.num_key_heads // cut.devices
        self.num_value_heads = layer.num_value_heads // cut.devices
        self.key_dim, self.value_dim = layer.key_dim, layer.value_dim
        self.conv_width, self.epsilon, self.ops = layer.conv_width, layer.epsilon, layer.ops

    def specs(self) -> dict[str, P]:
        """Returns how the parameters that are cut are sharded."""
        axis = self.cut.axis
        return {"conv": P(axis, None), "a_log": P(axis), "dt_bias": P(axis)}

    def whole(self) -> dict[str, jax.Array]:
        """Returns the convolution as the layer of one device has it."""
        return {"conv": ungrouped(self.conv[...].T, self.parts, self.cut.leaves, self.cut.leaves).T}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a parameter of the layer of one device as this one has it."""
        return {name: self._stored_channels(value) if name == "conv" else value}

    def extend(
        self, x: jax.Array, state: DeltaNetState, *, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, DeltaNetState]:
        """Continues sequences; see `GatedDeltaNet.extend`."""
        y, new = super().extend(x, state, start=start, lengths=lengths)
        # The kernel returns the edges of this device; these are equal on all by their type too.
        last = (new.rule.length - 1) // STATE_INTERVAL * STATE_INTERVAL
        rule = dataclasses.replace(new.rule, edge=jnp.maximum(state.rule.edge, last))
        return y, new._replace(rule=rule)

    def _stored_channels[T: (jax.Array, np.ndarray)](self, conv: T) -> T:
        """Returns the convolution with its channels in the order of the groups."""
        groups = grouped(cast(Any, conv.T), self.parts, self.cut.leaves)
        return cast(T, groups.reshape(conv.shape[1], conv.shape[0]).T)

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        if x.ndim != 3:
            raise ValueError(f"GatedDeltaNet: x must have the shape (batch, tokens, features), got {x.shape}.")
        # The convolution and its state have the channels in the order of the groups, whatever the number of devices.
        groups = self.qkvz.columns(x).reshape(*x.shape[:2], self.cut.own_leaves, -1)
        mixed, z = jnp.split(groups, [self.channels // self.cut.own_leaves], axis=-1)
        b, a = jnp.split(self.ba(x), 2, axis=-1)
        g, beta = self.ops.delta_gates(b, a, self.a_log[...], self.dt_bias[...])
        return mixed.reshape(*x.shape[:2], self.channels), z.reshape(*x.shape[:2], -1), g, beta

    def _conv_heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._heads(self.ops.causal_conv(mixed, self._kernel(mixed)))

    def _conv_heads_extend(
        self, mixed: jax.Array, inputs: jax.Array, **places: Any
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        mixed, new = self.ops.causal_conv_extend(mixed, self._kernel(mixed), inputs, **places)
        return self._heads(mixed), new

    def _heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values of the channels in the order of the groups."""
        query, key, value = self._sizes.split(ungrouped(mixed, self.parts, self.cut.leaves, self.cut.own_leaves))
        return self.ops.l2_norm(query), self.ops.l2_norm(key), value

    def _normed(self, y: jax.Array, z: jax.Array) -> jax.Array:
        if self.ops is PLAIN:
            return super()._normed(y, z)

        z = z.reshape(y.shape)

        def run(scale: jax.Array, heads: tuple[jax.Array, ...], _: tuple[jax.Array, ...]) -> jax.Array:
            return self.ops.gated_rms_norm(heads[0], heads[1], scale, eps=self.epsilon)

        return by_heads(run, self.norm_scale[...], (y, z), cut=self.heads_cut)


def state_specs(axis: str) -> DeltaNetState:
    """Returns how the states of a layer are sharded: by heads and channels."""
    heads: Any = P(None, axis, None, None)
    return DeltaNetState(
        bijax.DeltaRuleState(
            state=heads,
            key=heads,
            residual=heads,
            inverse=heads,
            decay=cast(Any, P(None, axis, None)),
            edge=cast(Any, P()),
            length=cast(Any, P()),
        ),
        cast(Any, P(None, None, axis)),
    )


def slot_specs(axis: str) -> DeltaNetSlots:
    """Returns how the slots of a layer are sharded, as its states."""
    rule, inputs = state_specs(axis)
    return DeltaNetSlots(rule.state, rule.key, rule.residual, rule.inverse, rule.decay, rule.edge, rule.length, inputs)


def snapshot_specs(axis: str) -> DeltaNetSnapshot:
    """Returns how snapshots of a layer are sharded."""
    return DeltaNetSnapshot(cast(Any, P(None, axis, None, None)), cast(Any, P(None, None, axis)))
