"""Checks of a mesh and a model before the model is cut over devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from ..ops import INVARIANT
from .layers import Linear
from .layers.embed import Embed
from .parallel_layers import Cut

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig

_OP = "partition"


def check_mesh(mesh: Mesh, axis: str, leaves: int) -> Cut:
    """Returns how models are cut over a mesh axis.

    Raises:
        ValueError: If the mesh has no such axis, its number of devices or that of leaves is not a power of two, or
            there are more devices than leaves.
    """
    if axis not in mesh.shape:
        raise ValueError(f"{_OP}: axis must be one of the mesh's axes {tuple(mesh.shape)}, got {axis!r}.")
    return check_sizes(axis, mesh.shape[axis], leaves)


def check_sizes(axis: str, devices: int, leaves: int) -> Cut:
    """Returns how models are cut over a number of devices.

    Raises:
        ValueError: As `check_mesh`.
    """
    for name, number in (("leaves", leaves), (f"the number of devices of axis {axis!r}", devices)):
        if number < 1 or number & (number - 1):
            raise ValueError(f"{_OP}: {name} must be a power of two, got {number}; sums are added as a binary tree.")
    if devices > leaves:
        raise ValueError(
            f"{_OP}: each device needs a leaf of the sums, got {leaves} leaves for the {devices} devices of axis"
            f" {axis!r}; use fewer devices, or more leaves, which have other bits."
        )
    return Cut(axis, devices, leaves)


def check_config(config: LlamaConfig, cut: Cut) -> None:
    """Checks that a model with these numbers can be cut.

    Raises:
        ValueError: If the devices do not divide its heads, the leaves do not divide a sum, or it has experts,
            linear or latent attention, or an output gate of attention.
    """
    if config.num_kv_heads % cut.devices:
        raise ValueError(
            f"{_OP}: the devices of axis {cut.axis!r} must divide the key/value heads, got {cut.devices} devices and"
            f" {config.num_kv_heads} heads; use a mesh with fewer devices on this axis."
        )
    lengths = {
        "columns of the query heads": config.num_heads * config.head_dim,
        "columns of the key/value heads": config.num_kv_heads * config.head_dim,
        "intermediate size": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for name, length in lengths.items():
        if length % cut.leaves:
            raise ValueError(
                f"{_OP}: the {cut.leaves} leaves of a sum must divide the {name}, got {length}; use fewer leaves, or"
                " pad the weights with zeros."
            )
    if (other := config.experts or config.linear or config.latent) is not None:
        raise ValueError(
            f"{_OP}: the model must have no experts, no linear and no latent attention, got {other}; cut it with"
            " bijax.parallel."
        )
    if config.output_gate:
        raise ValueError(f"{_OP}: attention must have no output gate, got output_gate=True.")


def check_layers(layers: Iterable[Any]) -> None:
    """Checks that layers can be cut.

    Raises:
        ValueError: If one is not a linear layer or an embedding, or has other operations than `INVARIANT`.
    """
    for layer in layers:
        if type(layer) not in (Linear, Embed):
            raise ValueError(f"{_OP}: the layers must be flax_layers' linear ones, got a {type(layer).__name__}.")
        if layer.ops != INVARIANT:
            raise ValueError(f"{_OP}: the model must have the operations INVARIANT, got {layer.ops}.")
