"""States and snapshots of linear attention on a mesh: each device has those of its heads."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..ops import Ops
from .layers import DeltaNetSlots, DeltaNetState
from .layers.delta_net_state import DeltaNetSnapshot
from .llama import Llama
from .parallel_delta_net import slot_specs, snapshot_specs, state_specs
from .served_states import States, init_snapshots, with_snapshot, with_state


def init_states_on(mesh: Mesh, axis: str, local: Llama, batch: int) -> list[DeltaNetState]:
    """Returns the states of sequences without tokens, for each layer with linear attention.

    Args:
        mesh: The mesh.
        axis: The axis that heads are cut over.
        local: The model of one device.
        batch: Number of sequences.
    """
    return _made(mesh, lambda: list(local.init_states(batch)), state_specs(axis))


def init_slots_on(mesh: Mesh, axis: str, local: Llama, number: int) -> States:
    """Returns slots for the states of each layer with linear attention; the arguments are those of `init_states_on`."""
    return _made(mesh, lambda: list(local.init_slots(number)), slot_specs(axis))


def init_snapshots_on(mesh: Mesh, axis: str, local: Llama, number: int) -> list[DeltaNetSnapshot]:
    """Returns room for snapshots of each layer with linear attention; the arguments are those of `init_states_on`."""
    return _made(mesh, lambda: init_snapshots(local, number), snapshot_specs(axis))


def keep_state_on(
    mesh: Mesh,
    axis: str,
    states: States,
    snapshots: list[DeltaNetSnapshot],
    slot: int,
    index: int,
    position: int,
    *,
    ops: Ops,
) -> list[DeltaNetSnapshot]:
    """Returns the snapshots, which are used up, with the state of a slot."""
    numbers = np.array([slot, index, position], np.int32)
    return [_keep(s, held, numbers, mesh=mesh, axis=axis, ops=ops) for s, held in zip(states, snapshots, strict=True)]


def restore_state_on(
    mesh: Mesh, axis: str, states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int
) -> States:
    """Returns the states, which are used up, with a snapshot in a slot."""
    numbers = np.array([slot, index, position], np.int32)
    return [_restore(state, held, numbers, mesh=mesh, axis=axis) for state, held in zip(states, snapshots, strict=True)]


def _made(mesh: Mesh, make: Callable[[], Any], specs: Any) -> Any:
    number = len(jax.eval_shape(make))
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=[specs] * number))()


@functools.partial(jax.jit, static_argnames=("mesh", "axis", "ops"), donate_argnames="snapshots")
def _keep(
    state: DeltaNetSlots, snapshots: DeltaNetSnapshot, numbers: jax.Array, *, mesh: Mesh, axis: str, ops: Ops
) -> DeltaNetSnapshot:
    def run(state: DeltaNetSlots, snapshots: DeltaNetSnapshot, numbers: jax.Array) -> DeltaNetSnapshot:
        return with_state(snapshots, state, numbers, ops=ops)

    held = snapshot_specs(axis)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(slot_specs(axis), held, P()), out_specs=held)
    return mapped(state, snapshots, numbers)


@functools.partial(jax.jit, static_argnames=("mesh", "axis"), donate_argnames="state")
def _restore(
    state: DeltaNetSlots, snapshots: DeltaNetSnapshot, numbers: jax.Array, *, mesh: Mesh, axis: str
) -> DeltaNetSlots:
    kept = slot_specs(axis)
    mapped = jax.shard_map(with_snapshot, mesh=mesh, in_specs=(kept, snapshot_specs(axis), P()), out_specs=kept)
    return mapped(state, snapshots, numbers)
