"""The pipeline of keys and values in shared memory, between the copying and the computing warpgroups."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._keys import KeySource, Pages
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper.zero_fill import WORD, zero_fill_rows
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import tiled

_NEVER: Final = 30  # no position is 2 ** 30


class Stages(NamedTuple):
    """Shared memory and barriers of keys and of values.

    Attributes:
        keys: (stages, block, H).
        values: (stages, block, V).
        found: (stages, block / 32) int32, for partially seen blocks: a bit per row of values that was not finite; see
            `zero_fill_rows`.
        keys_full: A barrier for each stage.
        values_full: The same, plus one for values to be zero-filled.
        keys_free: A barrier for each stage.
        values_free: The same.
    """

    keys: Any
    values: Any
    found: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any

    @classmethod
    def types(cls, stages: int, source: KeySource, size: int, value_size: int, dtype: Any, readers: int) -> "Stages":
        """Returns the types of the attributes.

        Args:
            stages: Number of stages.
            source: Where blocks come from.
            size: Width of a head.
            value_size: The same of the values.
            dtype: Of keys and values.
            readers: Warpgroups that compute.
        """
        keys, values = (
            plgpu.SMEM((stages, source.block, width), dtype, transforms=tiled(dtype, width))
            for width in (size, value_size)
        )
        return cls(
            keys=keys,
            values=values,
            found=plgpu.SMEM((stages, source.block // WORD), jnp.int32),
            keys_full=plgpu.Barrier(num_arrivals=source.copies, num_barriers=stages),
            values_full=plgpu.Barrier(num_arrivals=source.copies, num_barriers=stages + 1),
            keys_free=plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
            values_free=plgpu.Barrier(num_arrivals=readers, num_barriers=stages),
        )


@dataclass(frozen=True)
class Ring:
    """Stages of keys and of values, filled in the order of the blocks; keys one block ahead of values.

    Attributes:
        stages: Number of stages of each.
        source: Where the blocks come from.
        interpret: Whether Mosaic's interpreter runs the kernel.

    The others are those of `Stages`.
    """

    stages: int
    source: KeySource
    interpret: bool
    keys: Any
    values: Any
    found: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any

    @classmethod
    def of(cls, stages: int, source: KeySource, interpret: Any, memory: Stages) -> "Ring":
        """Returns the ring of stages in a kernel."""
        return cls(stages, source, bool(interpret), *memory)

    def slot(self, position: Any) -> Any:
        """Returns the stage of a position. A single stage is a zero opaque to ptxas.

        Constant operand descriptors would be hoisted out of the loop and spilled.
        """
        return lax.rem(position, self.stages) if self.stages > 1 else position >> _NEVER

    def fill(
        self,
        blocks: Blocks,
        position: Any,
        caches: tuple[Any, Any],
        table: Any,
        sequence: Any,
        head: Any,
    ) -> None:
        """Fills stages with the blocks of a tile, keys one block ahead of values.

        Args:
            blocks: The blocks.
            position: Pipeline position of the first.
            caches: Keys and values in GPU memory.
            table: The pages of each sequence, or None.
            sequence: Index of the sequence.
            head: Index of the key head.
        """
        source, (keys, values) = self.source, caches

        def fill_keys(block: Any, pages: Pages) -> None:
            at = position + (block - blocks.first)
            slot = self.slot(at)
            await_free(at, self.stages, self.keys_free.at[slot])
            source.copy(keys, pages, self.keys.at[slot], self.keys_full.at[slot], sequence, block, head)

        def fill_values(block: Any, pages: Pages) -> None:
            at = position + (block - blocks.first)
            slot, in_part = self.slot(at), blocks.in_part(block)
            await_free(at, self.stages, self.values_free.at[slot])
            full = self.values_full.at[jnp.where(in_part, self.stages, slot)]
            source.copy(values, pages, self.values.at[slot], full, sequence, block, head)

            @pl.when(in_part)
            def _() -> None:
                start = block * source.block
                plgpu.barrier_wait(self.values_full.at[self.stages])
                ends = blocks.start - start, blocks.end - start
                zero_fill_rows(self.values.at[slot], *ends, self.found.at[slot], self.interpret)
                plgpu.commit_smem()
                for _ in range(source.copies):
                    plgpu.barrier_arrive(self.values_full.at[slot])

        def one(block: Any, pages: Pages) -> Pages:
            following = source.pages(table, sequence, block + 1)
            pl.when(block + 1 < blocks.last)(partial(fill_keys, block + 1, following))
            fill_values(block, pages)
            return following

        pages = source.pages(table, sequence, blocks.first)
        pl.when(blocks.first < blocks.last)(partial(fill_keys, blocks.first, pages))
        lax.fori_loop(blocks.first, blocks.last, one, pages)

    def drain(self, filled: Any) -> None:
        """Waits until the stages filled last are free."""
        drain((self.keys_free, self.values_free), self.stages, filled, self.slot)
