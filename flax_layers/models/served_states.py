"""The states of a served model's layers of linear attention: slots of running sequences, and snapshots."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Ops
from ._layered import Stored
from .layers import DeltaNetSlots, DeltaNetState, GatedDeltaNet
from .layers.delta_net_state import DeltaNetSnapshot
from .llama import Llama

type Pages = list[tuple[jax.Array, jax.Array | None]]
type States = list[DeltaNetSlots]


def by_layer(pages: Pages, states: States, linear: Sequence[bool]) -> list[Stored]:
    """Returns pages and states in the order of the layers; `linear` says which layers have states."""
    attention, others = iter(pages), iter(states)
    return [next(others) if is_linear else next(attention) for is_linear in linear]


def by_kind(stored: Sequence[Stored]) -> tuple[Pages, States]:
    """Returns what layers keep as pages and states."""
    states = [layer for layer in stored if isinstance(layer, DeltaNetSlots)]
    return [layer for layer in stored if not isinstance(layer, (DeltaNetSlots, DeltaNetState))], states


def init_snapshots(model: Llama, number: int) -> list[DeltaNetSnapshot]:
    """Returns empty snapshots of each layer with linear attention."""
    layers = [block.attention for block in model.blocks if isinstance(block.attention, GatedDeltaNet)]
    return [
        DeltaNetSnapshot(
            jnp.zeros((number, layer.num_value_heads, layer.key_dim, layer.value_dim), jnp.float32),
            jnp.zeros((number, layer.conv_width - 1, layer.channels), model.dtype),
        )
        for layer in layers
    ]


def keep_state(
    states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int, *, ops: Ops
) -> list[DeltaNetSnapshot]:
    """Returns the snapshots, which are used up, with the state of a slot."""
    numbers = np.array([slot, index, position], np.int32)
    return [_keep(held, state, numbers, ops=ops) for state, held in zip(states, snapshots, strict=True)]


def restore_state(states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int) -> States:
    """Returns the states, which are used up, with a snapshot in a slot."""
    numbers = np.array([slot, index, position], np.int32)
    return [_restore(state, held, numbers) for state, held in zip(states, snapshots, strict=True)]


def with_state(snapshots: DeltaNetSnapshot, state: DeltaNetSlots, numbers: jax.Array, *, ops: Ops) -> DeltaNetSnapshot:
    """Returns snapshots of a layer with the state of a slot; `numbers` are (slot, index, position)."""
    slot, index, position = numbers[:1], numbers[1:2], numbers[2:]
    width = snapshots.inputs.shape[1] + 1
    taken = DeltaNetSnapshot.of(state.rows(slot, position), position, conv_width=width, ops=ops)
    return jax.tree.map(lambda a, new: a.at[index].set(new, mode="drop"), snapshots, taken)


def with_snapshot(state: DeltaNetSlots, snapshots: DeltaNetSnapshot, numbers: jax.Array) -> DeltaNetSlots:
    """Returns states of a layer with a snapshot in a slot; `numbers` are (slot, index, position)."""
    slot, index, position = numbers[:1], numbers[1:2], numbers[2:]
    taken: DeltaNetSnapshot = jax.tree.map(lambda a: jnp.take(a, index, axis=0, mode="clip"), snapshots)
    return state.with_rows(slot, taken.resume(position, key_heads=state.key.shape[1], room=state.inputs.shape[1]))


_keep = jax.jit(with_state, static_argnames="ops", donate_argnames="snapshots")
_restore = jax.jit(with_snapshot, donate_argnames="state")
