"""The tree over the chains of a tile inside one block: where sums wait until the other side of their node is summed.

While the last chain is summed, one sum for each level of the tree waits. Two chains at a time have an accumulator each,
and the second one begins while the products of the first are under way. Sums of the lowest levels wait in registers,
those of the upper levels in a workspace of the block in GPU memory that stays in the L2 cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.parts.hopper.chunks import put_away, take_back
from pallas_kernels.parts.hopper.tile import Arithmetic

_THREADS: Final = 128
_REGISTERS: Final = {1: 192, 2: 192, 3: 96}
"""Registers of a thread for sums, the accumulator included, by number of warpgroups that multiply."""


@dataclass(frozen=True)
class LeafTree:
    """The tree over the chains of a tile.

    Attributes:
        chains: Number of chains, at least 2.
        shape: Rows and columns of an accumulator.
        warpgroups: Number of warpgroups that multiply.
        interpret: Whether the kernel runs in the interpreter.
    """

    chains: int
    shape: tuple[int, int]
    warpgroups: int
    interpret: Any

    @property
    def in_registers(self) -> int:
        """Levels of the tree whose sums wait in registers."""
        rows, columns = self.shape
        return _REGISTERS[self.warpgroups] * _THREADS // (rows * columns) - 1

    @property
    def in_memory(self) -> int:
        """Levels of the tree whose sums wait in memory."""
        return max(0, _levels(self.chains) - self.in_registers)

    def workspace(self, blocks: int) -> jax.ShapeDtypeStruct:
        """Returns the type of the workspace."""
        return jax.ShapeDtypeStruct((blocks, self.warpgroups, self.in_memory, math.prod(self.shape)), jnp.float32)

    def add(self, sum_chains: Callable[[Any, int], tuple[Any, ...]], waiting: Any) -> Any:
        """Sums the chains and adds their sums as `pallas_kernels.contract.add_as_tree` does.

        Args:
            sum_chains: Returns the sums of neighbouring chains; receives the first one and their number, 1 or 2.
            waiting: This warpgroup's part of the workspace.
        """
        arithmetic = Arithmetic(interpret=bool(self.interpret))

        def node(first: int, count: int) -> Any:
            if count == 1:
                return sum_chains(first, 1)[0]
            level, left = _levels(count), 1 << _levels(count) - 1
            if level > self.in_registers:
                place = waiting.at[level - 1 - self.in_registers]
                put_away(node(first, left), place, self.interpret)
                right = node(first + left, count - left)
                return take_back(place, self.shape, self.interpret) + right
            if count == 2:
                return arithmetic.sum_in_place(*sum_chains(first, 2))
            return arithmetic.sum_in_place(node(first, left), node(first + left, count - left))

        return node(0, self.chains)


def _levels(count: int) -> int:
    return (count - 1).bit_length()
