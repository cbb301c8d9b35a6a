"""What models of one device and of several say of themselves to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.contract import SplitAttentionContract

from .adapters import Adapters
from .layers.delta_net_state import STATE_INTERVAL

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig


class ServedModel:
    """The properties of a `bijax.serving.Model` that follow from its configuration and its adapters."""

    config: LlamaConfig
    one_program: bool
    _adapters: Adapters | None
    _is_plain: bool

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.config.max_position_embeddings

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that requests can choose."""
        return () if self._adapters is None else self._adapters.names

    @property
    def least_common_prefix(self) -> int | None:
        """Tokens per attention split, as only whole splits are read once; None without `one_program`."""
        if not self.one_program or self._is_plain or self.config.latent is not None:
            return None
        return SplitAttentionContract().split

    @property
    def state_interval(self) -> int | None:
        """Positions at which a state can be kept are multiples of this; None without linear attention."""
        return STATE_INTERVAL if self.config.linear is not None else None
