"""What all modules over the devices of a mesh have in common: their arrays and their structure are apart."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
from flax import nnx

from ..ops import Ops
from .partition_layers import WEIGHTS

type Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PartitionedModule[M]:
    """The parameters of a module over the devices of a mesh, and its structure.

    Attributes:
        params: The parameters, each sharded over the mesh: a tree of dicts.
        specs: A tree of the same structure with their `jax.sharding.PartitionSpec`.
        rest: What the module holds besides parameters, the same on all devices.
        graph: The structure of the module of one device.
    """

    params: Params
    specs: Params
    rest: Any = dataclasses.field(repr=False)
    graph: Any = dataclasses.field(repr=False)
    _abstract: Any = dataclasses.field(repr=False)

    def merged(self, params: Params, rest: Any) -> M:
        """Returns the module of one device with other leaves: arrays, or one object for each, as a `PartitionSpec`.

        Args:
            params: A tree with the structure of `params`.
            rest: One with the structure of `rest`.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        return nnx.merge(self.graph, state, rest)

    def with_ops(self, ops: Ops) -> Self:
        """Returns the module with the same parameters and other operations.

        Args:
            ops: The operations; with `PLAIN` products and sums are JAX's, whose bits depend on the number of devices.
        """
        local: Any = self.merged(self.params, self.rest)
        split: Any = nnx.split(nnx.with_attributes(local, ops=ops), WEIGHTS, ...)
        return dataclasses.replace(self, graph=split[0])
