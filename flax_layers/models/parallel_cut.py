"""How a model is cut over the devices of a mesh."""

import math
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Cut:
    """How a model is cut.

    Attributes:
        axis: The mesh axis that heads, MLPs and the vocabulary are cut over.
        devices: Its devices.
        leaves: Leaves of each sum that is cut.
        expert_axis: Another axis that experts are cut over, or None.
        expert_devices: Its devices.
    """

    axis: str
    devices: int
    leaves: int
    expert_axis: str | None = None
    expert_devices: int = 1

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that experts are cut over."""
        return (self.axis,) if self.expert_axis is None else (self.expert_axis, self.axis)

    @property
    def devices_of_experts(self) -> int:
        """The devices that experts are cut over."""
        return self.devices * self.expert_devices

    @property
    def own_leaves(self) -> int:
        """Leaves of each sum on one device."""
        return self.leaves // self.devices

    def of_heads(self, heads: int) -> "Cut":
        """Returns the cut of what has one number for each head: in as many leaves as leaves and heads have in common.

        Args:
            heads: Heads on all devices together, a multiple of the devices.
        """
        return replace(self, leaves=math.gcd(heads, self.leaves))


class CutLayer:
    """A layer whose parameters are cut over devices, for use inside `jax.shard_map`."""

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters that are cut are sharded."""
        raise NotImplementedError

    def whole(self) -> dict[str, jax.Array]:
        """Returns the parameters that the layer of one device has in another order, in that order."""
        return {}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the parameters that a parameter of the layer of one device becomes, arrays of the host."""
        return {name: value}
