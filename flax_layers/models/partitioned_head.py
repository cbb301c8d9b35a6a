"""The head of a model for multi-token prediction over the devices of a mesh."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .mtp import MTPHead
from .partition_checks import check_config, check_layers, check_mesh
from .partition_layers import block_layers, cut_block, laid_out
from .partitioned import PartitionedLlama
from .partitioned_module import PartitionedModule

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig


@dataclasses.dataclass(frozen=True)
class PartitionedHead(PartitionedModule[MTPHead]):
    """A head over the devices of a mesh; made by `partition_head`.

    Attributes:
        params: The parameters, each sharded over the mesh of its model: a tree of dicts.
        specs: A tree of the same structure with their `jax.sharding.PartitionSpec`.
        config: The numbers of the block.
        rest: What a head holds besides parameters, the same on all devices.
        graph: The structure of the head of one device.
    """

    config: LlamaConfig


def partition_head(head: MTPHead, model: PartitionedLlama) -> PartitionedHead:
    """Cuts the block of a head as those of its model; its norms and `fc` are repeated on all devices.

    Args:
        head: The head, with `INVARIANT` operations. Its parameters are taken over.
        model: Its model.

    Raises:
        ValueError: If they do not belong together, or the block cannot be cut, as `partition`.

    Guarantee: row-invariant as `MTPHead`, with the same bits on 1, 2, 4, ... `leaves` devices.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> from flax_layers import Llama, partition
        >>> config = LlamaConfig.tiny(head_dim=8)
        >>> model = partition(Llama(config, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("model",)))
        >>> head = partition_head(MTPHead(config, rngs=nnx.Rngs(1)), model)
        >>> tuple(head.specs["block"]["attention"]["out"]["kernel"]), tuple(head.specs["fc"]["kernel"])
        (('model', None), ())
    """
    head.check_model("partition_head", model.config)
    cut = check_mesh(model.mesh, model.axis, model.leaves, model.expert_axis)
    check_config(head.config, cut)
    check_layers(layer for _, layer in block_layers(head.block, ("block",)))
    whole_graph, whole_state = nnx.split(head)
    local = nnx.merge(whole_graph, whole_state)  # the copy shares the arrays
    cut_block(local.block, head.config, cut)
    params, specs, rest, graph, abstract = laid_out(local, block_layers(local.block, ("block",)))
    placed = jax.device_put((params, rest), (model.shardings(specs), NamedSharding(model.mesh, P())))
    return PartitionedHead(placed[0], specs, placed[1], graph, abstract, head.config)
