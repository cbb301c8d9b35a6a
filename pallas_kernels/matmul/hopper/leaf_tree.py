"""The tree over the chains of a tile inside one block: where sums wait until the other side of their node is summed.

Two chains at a time have an accumulator each, and the second one begins while the products of the first are under way.
A loop takes the pairs in turn; its number in binary says which sums wait, as when one is added to a number: a 1 is the
sum of the left side of a node. Sums of the lowest levels wait in registers, those of the upper levels in shared memory,
or if they are too many in a workspace of the block in GPU memory.

It has to be a loop: written out for eight chains, instructions do not fit into the instruction cache.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import add_as_tree
from pallas_kernels.matmul.schedule.hopper.leaf_levels import LeafLevels, leaf_levels
from pallas_kernels.parts.hopper.chunks import put_away, take_back
from pallas_kernels.parts.hopper.tile import Arithmetic, filled

Sums = Callable[[Any, int], tuple[Any, ...]]


@dataclass(frozen=True)
class LeafTree:
    """The tree over the chains of a tile.

    Attributes:
        chains: Number of chains, at least 2.
        shape: Rows and columns of an accumulator.
        warpgroups: Number of warpgroups that multiply.
        interpret: Whether the kernel runs in the interpreter.
        in_result: Whether sums wait in the shared memory from which the result is stored.
    """

    chains: int
    shape: tuple[int, int]
    warpgroups: int
    interpret: Any
    in_result: bool = False

    @property
    def whole(self) -> bool:
        """Whether the tree is a whole one, whose nodes have as many chains on both sides."""
        return self.chains & (self.chains - 1) == 0

    @property
    def levels(self) -> LeafLevels:
        """Where the sums of a whole tree wait."""
        return leaf_levels(self.chains, math.prod(self.shape), self.warpgroups)

    @property
    def in_memory(self) -> int:
        """Levels of the tree whose sums wait in memory."""
        return self.levels.in_memory if self.whole else 0

    def workspace(self, blocks: int) -> jax.ShapeDtypeStruct:
        """Returns the type of the workspace."""
        return jax.ShapeDtypeStruct((blocks, self.warpgroups, self.in_memory, math.prod(self.shape)), jnp.float32)

    def add(self, sum_chains: Sums, waiting: Any) -> Any:
        """Sums the chains and adds their sums as `pallas_kernels.contract.add_as_tree` does.

        Args:
            sum_chains: Returns the sums of neighbouring chains; receives the first one and their number, 1 or 2.
            waiting: This warpgroup's part of the workspace.
        """
        arithmetic, (together, in_registers, _) = Arithmetic(interpret=bool(self.interpret)), self.levels

        def group(index: Any) -> Any:
            sums = sum_chains(index * together, together)
            return sums[0] if len(sums) == 1 else arithmetic.sum_in_place(*sums)

        if not self.whole:
            return add_as_tree(lambda chain: sum_chains(chain, 1)[0], self.chains, arithmetic.sum_in_place)
        groups = self.chains // together
        if groups == 1:
            return group(0)

        def step(index: Any, held: tuple[Any, ...]) -> tuple[Any, ...]:
            total, kept = group(index), []
            for level, old in enumerate(held):
                ones = (1 << level) - 1
                both = arithmetic.chosen(index & (ones + 1), arithmetic.sum_in_place(old, total), total)
                kept.append(both if level == 0 else arithmetic.chosen((index & ones) == ones, both, old))
                total = both
            self._wait(index, total, waiting)
            return tuple(kept)

        if in_registers:
            held = (filled(self.shape, 0.0),) * in_registers
            total = lax.fori_loop(0, groups, step, held)[-1]
        else:  # the last sum would need registers in the whole loop
            pl.loop(0, groups - 1)(lambda index: self._wait(index, group(index), waiting))
            total = group(groups - 1)
        return self._climb(total, self.in_memory, waiting)

    def _wait(self, index: Any, total: Any, waiting: Any) -> None:
        """Leaves the sum after the groups up to `index` in memory, if it is the left side of a node there."""
        for level in range(self.in_memory):
            ones = (1 << self.levels.in_registers + level) - 1

            @pl.when((index & (2 * ones + 1)) == ones)
            def _(level: int = level) -> None:
                if self.in_result:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left
                put_away(self._climb(total, level, waiting), waiting.at[level], self.interpret)

    def _climb(self, total: Any, levels: int, waiting: Any) -> Any:
        """Adds the sums that wait on the first `levels` in memory."""
        for level in range(levels):
            total = take_back(waiting.at[level], self.shape, self.interpret) + total
        return total
