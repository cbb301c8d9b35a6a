"""The pipeline of a product on a Hopper GPU: a tile scheduler, and in each block a circular buffer of stages.

One warpgroup copies operand tiles into the stages (TMA), waiting for each stage to be empty before refilling it; other
warpgroups wait for a full stage, multiply its tiles (wgmma) and release it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.stages import await_free, drain

_REGISTERS: Final = {
    (2, 0): (40, 0, 232),
    (3, 0): (40, 0, 152),
    (1, 1): (40, 104, 232),
    (1, 2): (40, 80, 232),
    (2, 1): (40, 88, 192),
}


class Roles(NamedTuple):
    """The roles of a block's warpgroups: the first multiply, the next transpose, the last one copies.

    Attributes:
        multiply: Number of warpgroups that multiply.
        transpose: Number of warpgroups that transpose tiles in shared memory.
    """

    multiply: int
    transpose: int = 0

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups of a block."""
        return self.multiply + self.transpose + 1

    def limit_registers(self, role: Literal["copy", "transpose", "multiply"]) -> None:
        """Sets the register limit of a thread's role; two warpgroups keep the default."""
        if self in _REGISTERS:
            registers = _REGISTERS[self][("copy", "transpose", "multiply").index(role)]
            plgpu.set_max_registers(registers, action="increase" if role == "multiply" else "decrease")


class Place(NamedTuple):
    """The position of a tile.

    Attributes:
        part: Index among several results; None for a single result.
        entry: Entry of the stack; None without one.
        row: First row.
        column: First column.
        valid: Number of result rows in the tile if only the GPU knows it; None if it follows from the result's shape.
    """

    part: Any
    entry: Any
    row: Any
    column: Any
    valid: Any = None


@dataclass(frozen=True)
class TileScheduler:
    """The tile scheduler of a launch: block i processes tiles i, i + blocks, i + 2 blocks, ...

    Attributes:
        stack: Leading axes of the result.
        row_tiles: Tiles along the rows.
        column_tiles: Tiles along the columns.
        tile_rows: Rows of a tile.
        tile_columns: Columns of a tile.
        group: Tiles along the rows processed before the next column.
        most_blocks: Most blocks to launch; 0 for one per tile.
        parts: Number of such results, one after another, for example K splits; None for a single result.
    """

    stack: tuple[int, ...]
    row_tiles: int
    column_tiles: int
    tile_rows: int
    tile_columns: int
    group: int
    most_blocks: int
    parts: int | None = None

    @property
    def tiles(self) -> int:
        """Tiles of all results."""
        return math.prod(self.stack) * (self.parts or 1) * self.row_tiles * self.column_tiles

    @property
    def blocks(self) -> int:
        """Number of blocks launched."""
        return min(self.tiles, self.most_blocks) if self.most_blocks else self.tiles

    @property
    def most_rounds(self) -> int:
        """Most tiles of any block."""
        return -(-self.tiles // self.blocks)

    def count(self, block: Any) -> Any:
        """Returns the number of tiles of a block."""
        return lax.div(self.tiles - block + self.blocks - 1, self.blocks)

    def place(self, block: Any, tile: Any) -> Place:
        """Returns the position of a block's tile by its index."""
        index, part, entry, area = block + tile * self.blocks, None, None, self.row_tiles * self.column_tiles
        if self.parts is not None:
            part, index = lax.div(index, self.tiles // self.parts), lax.rem(index, self.tiles // self.parts)
        if self.stack:
            entry = lax.div(index, area)
        if self.stack or self.parts is not None:
            index = lax.rem(index, area)
        # Bands of `group` rows, so that concurrent blocks share operands in the L2 cache.
        band = lax.div(index, self.group * self.column_tiles)
        inside = lax.rem(index, self.group * self.column_tiles)
        height = jnp.minimum(self.row_tiles - band * self.group, self.group)
        row, column = band * self.group + lax.rem(inside, height), lax.div(inside, height)
        return Place(part, entry, row * self.tile_rows, column * self.tile_columns)


class Schedulable(Protocol):
    """The properties that the number of stages depends on."""

    @property
    def most_rounds(self) -> int:
        """Most tiles of any block."""


@dataclass(frozen=True)
class Ring:
    """The stages of a block, a circular buffer.

    Attributes:
        stages: Number of stages.
        steps: Stages that a tile takes in order; 0 if only the GPU knows.
    """

    stages: int
    steps: int = 0

    @classmethod
    def of(cls, scheduler: "Schedulable", steps: int, most_stages: int, multiple: int = 1) -> "Ring":
        """Returns the circular buffer for tiles of `steps` steps, without stages that no block would use."""
        used = -(-steps * scheduler.most_rounds // multiple) * multiple
        return cls(min(most_stages, used), steps)

    def slot(self, tile: Any, step: Any) -> Any:
        """Returns the stage of a step of a tile."""
        return self.at(tile * self.steps + step)

    def at(self, position: Any) -> Any:
        """Returns the stage of a position among the steps of all tiles of the block."""
        return lax.rem(position, self.stages)

    def produce(
        self,
        count: Any,
        empty: Any,
        begin: Callable[[Any], Any],
        copy: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        """Fills the stages for a block's tiles.

        Args:
            count: Tiles.
            empty: Barriers on which the stages are released.
            begin: Returns the data of a tile.
            copy: Receives it, the tile, the step and the stage; starts the copies.
        """

        @pl.loop(0, count)
        def _(tile: Any) -> None:
            place = begin(tile)

            @pl.loop(0, self.steps)
            def _(step: Any) -> None:
                self.fill(tile * self.steps + step, empty, lambda slot: copy(place, tile, step, slot))

        self.drain(count * self.steps, empty)

    def fill(self, position: Any, empty: Any, copy: Callable[[Any], None]) -> None:
        """Fills the stage of a position once it is empty; `copy` receives the stage."""
        slot = self.at(position)
        await_free(position, self.stages, empty.at[slot])
        copy(slot)

    def drain(self, total: Any, empty: Any) -> None:
        """Waits until the last stages of `total` are empty."""
        drain((empty,), self.stages, total)


def sum_steps(
    bounds: Sequence[Any],
    multiply: Callable[[int, Any], None],
    release: Callable[[Any], None],
    *,
    products: int,
    several: bool = True,
) -> None:
    """Sums the steps of chains; a step's products are awaited after the next step's are issued, in the next chain too.

    Args:
        bounds: The first step of each chain, and the end of the last one.
        multiply: Receives the index of a chain and a step; waits for its stage and issues its products.
        release: Releases a step's stage.
        products: Number of products of a step.
        several: Whether a chain may have more than one step.
    """

    def overlap(chain: int, step: Any) -> None:
        multiply(chain, step)
        plgpu.wgmma_wait(products)
        release(step - 1)

    for chain, (first, last) in enumerate(itertools.pairwise(bounds)):
        (multiply if chain == 0 else overlap)(chain, first)
        if several:
            pl.loop(first + 1, last)(functools.partial(overlap, chain))
    plgpu.wgmma_wait(0)
    release(bounds[-1] - 1)


def here() -> tuple[Any, Any]:
    """Returns the indices of the current warpgroup and block."""
    return lax.axis_index("warpgroup"), lax.axis_index("block")
