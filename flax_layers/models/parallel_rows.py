"""Blocks with experts in which each device has a part of the rows after attention (sequence parallelism)."""

import math
from dataclasses import dataclass
from typing import Any, Final

import jax

from bijax.core.forward_only import forward_only
from bijax.parallel import all_rows, own_rows

from ..ops import PLAIN
from .layers import Attention, LayerCache
from .parallel_experts import ParallelMoE
from .parallel_layers import RowParallelLinear

_FEWEST_ROWS: Final = 1024  # below, the sum is bound by its latency


@dataclass(frozen=True)
class RowCut:
    """How the rows of a block that appends tokens are cut over devices.

    The sum after attention leaves each device with its rows (reduce-scatter), of which it computes the norm, routes the
    tokens and adds the experts' results. Half as much is summed over the devices as if all had the whole sum
    (all-reduce), and what comes after it is not computed several times. Blocks with an MLP would gain nothing: they
    need all rows again after the norm, and a gather takes the time that the sum has won.

    Args:
        axis: The mesh axis that heads and MLPs are cut over.
        devices: Its devices.

    Guarantee: the bits of a block whose rows are not cut: norms, routing and experts are row-invariant, and an element
    of a sum has the same bits wherever it is added.
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
        return isinstance(block.mlp, ParallelMoE) and block.mlp.takes_own_rows

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
        own, y = block.after_attention(own, y, block.mlp.of_own_rows)
        return all_rows(own + y, self.axis).reshape(x.shape), cache


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
