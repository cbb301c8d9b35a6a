"""How a model is cut over the devices of a mesh."""

from dataclasses import dataclass


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
