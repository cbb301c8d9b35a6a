"""Checks of a mesh and a model before the model is cut over devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from ..ops import INVARIANT
from .layers import Embed, GatedDeltaNet, LatentAttention, Linear, MoE, QuantLinear, QuantMoE
from .parallel_cut import Cut

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig

_OP = "partition"
_LAYERS = (Linear, QuantLinear, Embed, MoE, QuantMoE, LatentAttention, GatedDeltaNet)


def check_mesh(mesh: Mesh, axis: str, leaves: int, expert_axis: str) -> Cut:
    """Returns how models are cut over the axes of a mesh; it may lack the one for experts.

    Raises:
        ValueError: If the mesh has no such axis, its number of devices or that of leaves is not a power of two, or
            there are more devices than leaves.
    """
    if axis not in mesh.shape:
        raise ValueError(f"{_OP}: axis must be one of the mesh's axes {tuple(mesh.shape)}, got {axis!r}.")
    if axis == expert_axis:
        raise ValueError(
            f"{_OP}: axis and expert_axis must be two axes, got {axis!r} for both; experts are cut over axis too."
        )
    if expert_axis not in mesh.shape:
        return check_sizes(axis, mesh.shape[axis], leaves)
    return check_sizes(axis, mesh.shape[axis], leaves, expert_axis, mesh.shape[expert_axis])


def check_sizes(axis: str, devices: int, leaves: int, expert_axis: str | None = None, expert_devices: int = 1) -> Cut:
    """Returns how models are cut over numbers of devices.

    Raises:
        ValueError: As `check_mesh`.
    """
    for name, number in (("leaves", leaves), (f"the number of devices of axis {axis!r}", devices)):
        if number < 1 or number & (number - 1):
            raise ValueError(f"{_OP}: {name} must be a power of two, got {number}; sums are added as a binary tree.")
    if expert_devices < 1 or expert_devices & (expert_devices - 1):
        raise ValueError(
            f"{_OP}: the number of devices of axis {expert_axis!r} must be a power of two, got {expert_devices}; use"
            f" {1 << (max(1, expert_devices).bit_length() - 1)} devices on this axis."
        )
    if devices > leaves:
        raise ValueError(
            f"{_OP}: each device needs a leaf of the sums, got {leaves} leaves for the {devices} devices of axis"
            f" {axis!r}; use fewer devices, or more leaves, which have different bits."
        )
    return Cut(axis, devices, leaves, expert_axis, expert_devices)


def check_config(config: LlamaConfig, cut: Cut) -> None:
    """Checks that a model with these numbers can be cut.

    Raises:
        ValueError: If the devices do not divide its heads or its experts, the leaves do not divide a sum, or there are
            several devices for experts and the model has none.
    """
    layers = range(config.num_layers)
    lengths = {"vocabulary": config.vocab_size, **_attention_lengths(config, cut)}
    if not all(config.has_experts(layer) for layer in layers):
        lengths["intermediate size"] = config.intermediate_size
    if config.experts is not None:
        _check_experts(config.experts.routing.num_experts, cut)
        if config.experts.shared_size:
            lengths["width of the shared experts"] = config.experts.shared_size
    elif cut.expert_devices > 1:
        raise ValueError(
            f"{_OP}: axis {cut.expert_axis!r} must have one device with a model without experts, got"
            f" {cut.expert_devices}; use a mesh without this axis."
        )
    for name, length in lengths.items():
        if length % cut.leaves:
            raise ValueError(
                f"{_OP}: the {cut.leaves} leaves of a sum must divide the {name}, got {length}; use fewer leaves, or"
                " pad the weights with zeros."
            )


def _attention_lengths(config: LlamaConfig, cut: Cut) -> dict[str, int]:
    """Returns the lengths of attention that leaves must divide, after a check of its heads."""
    heads, lengths, linear = {}, {}, config.linear
    if linear is not None:
        heads["key heads of linear attention"] = linear.num_key_heads  # they divide the value heads
        lengths["columns of the key heads of linear attention"] = linear.num_key_heads * linear.key_dim
        lengths["columns of the value heads of linear attention"] = linear.num_value_heads * linear.value_dim
    if config.latent is not None:
        heads["query heads"] = config.num_heads
        width = config.latent.nope_head_dim + config.latent.rope_head_dim
        lengths["columns of the query heads"] = config.num_heads * width
        lengths["columns of the values of all heads"] = config.num_heads * config.latent.value_head_dim
    elif not all(config.is_linear(layer) for layer in range(config.num_layers)):
        heads["key/value heads"] = config.num_kv_heads
        lengths["columns of the query heads"] = config.num_heads * config.head_dim
        lengths["columns of the key/value heads"] = config.num_kv_heads * config.head_dim
    for name, number in heads.items():
        if number % cut.devices:
            raise ValueError(
                f"{_OP}: the devices of axis {cut.axis!r} must divide the {name}, got {cut.devices} devices and"
                f" {number} heads; use a mesh with fewer devices on this axis."
            )
    return lengths


def _check_experts(experts: int, cut: Cut) -> None:
    if experts % cut.devices_of_experts:
        axes = " and ".join(map(repr, cut.expert_axes))
        raise ValueError(
            f"{_OP}: the devices of {'axis' if len(cut.expert_axes) == 1 else 'axes'} {axes} must divide the experts,"
            f" got {cut.devices_of_experts} devices and {experts} experts; use fewer devices."
        )


def check_layers(layers: Iterable[Any]) -> None:
    """Checks that the layers of a model can be cut.

    Args:
        layers: Those that are to be cut.

    Raises:
        ValueError: If one is not a linear layer, an embedding, attention or a mixture of experts, or has other
            operations than `INVARIANT`.
    """
    for layer in layers:
        if type(layer) not in _LAYERS:
            raise ValueError(
                f"{_OP}: the layers must be flax_layers' linear ones, embeddings, attention and mixtures of experts,"
                f" got a {type(layer).__name__}."
            )
        if layer.ops != INVARIANT:
            raise ValueError(f"{_OP}: the model must have the operations INVARIANT, got {layer.ops}.")
