"""Blocks in which each device has a part of the rows between the sums that are cut (sequence parallelism)."""

import math
from dataclasses import dataclass
from typing import Any, Final

import jax

from bijax.core.forward_only import forward_only
from bijax.parallel import all_rows, own_rows

from ..ops import PLAIN
from .layers import MLP, Attention, LayerCache
from .parallel_experts import ParallelMoE
from .parallel_layers import RowParallelLinear

_FEWEST_ROWS: Final = 1024  # below, two collectives of half the bytes take longer than one


@dataclass(frozen=True)
class RowCut:
    """How the rows of a block that appends tokens are cut over devices.

    The sum after attention and the sum after the MLP leave each device with its rows (reduce-scatter), of which it
    computes the norm, and experts their tokens. What is gathered is rounded, so fewer bytes travel than with sums that
    all devices have (all-reduce), and norms are not computed several times.

    Args:
        axis: The mesh axis that heads and MLPs are cut over.
        devices: Its devices.

    Guarantee: the bits of a block whose rows are not cut: norms and experts are row-invariant, and an element of a sum
    has the same bits wherever it is added.
    """

    axis: str
    devices: int

    def serves(self, block: Any, x: jax.Array) -> bool:
        """Returns whether the rows of x (B, T, hidden_size) are cut in this block."""
        rows = math.prod(x.shape[:-1])
        if self.devices == 1 or rows < _FEWEST_ROWS or rows % self.devices or block.mlp_norm.ops is PLAIN:
            return False
        if not (isinstance(block.attention, Attention) and isinstance(block.attention.out, RowParallelLinear)):
            return False
        if isinstance(block.mlp, ParallelMoE):
            return block.mlp.takes_own_rows
        return isinstance(block.mlp, MLP) and isinstance(block.mlp.down, RowParallelLinear)

    def extend(
        self, block: Any, x: jax.Array, normed: jax.Array, rotary: Any, cache: LayerCache, **places: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        """Appends tokens x (B, T, hidden_size), with their norm, as `Block.extend` does.

        Returns:
            The residual stream after the block, and the cache.

        Raises:
            UnsupportedError: When differentiated: the gradient of a norm's scale is a sum over all rows.
        """
        own = forward_only("Block.extend", lambda x: own_rows(_flat(x), self.axis), x)
        query, cache = block.attention.prepare(normed, rotary, cache, **places)
        y = block.attention.out.own_rows(block.attention.attended(normed, query, cache, **places))
        y = y if block.attention_output_norm is None else block.attention_output_norm(y)
        own, normed = block.mlp_norm.add(own, y)
        y = self._mlp(block.mlp, normed)
        y = y if block.mlp_output_norm is None else block.mlp_output_norm(y)
        return all_rows(own + y, self.axis).reshape(x.shape), cache

    def _mlp(self, mlp: Any, normed: jax.Array) -> jax.Array:
        """Returns the results of an MLP, or of experts, for this device's rows (R, hidden_size)."""
        if isinstance(mlp, ParallelMoE):
            return mlp.of_own_rows(normed)
        down: Any = mlp.down
        return down.own_rows(mlp.hidden(all_rows(normed, self.axis)))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
