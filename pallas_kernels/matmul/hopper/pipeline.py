"""The pipeline of a product on a Hopper GPU: blocks that walk tiles, and in each block a ring of stages.

One warpgroup copies tiles of the operands into the stages (TMA) and waits for a stage to be empty before it fills it
again; other warpgroups wait for a stage to be full, multiply what is there (wgmma) and give it back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_REGISTERS: Final = {
    (2, 0): (40, 0, 232),
    (3, 0): (40, 0, 152),
    (1, 1): (40, 104, 232),
    (1, 2): (40, 80, 232),
    (2, 1): (40, 88, 192),
}


class Roles(NamedTuple):
    """What the warpgroups of a block do: the first ones multiply, then come those that transpose, the last one copies.

    Attributes:
        multiply: Warpgroups that multiply.
        transpose: Warpgroups that transpose tiles in shared memory.
    """

    multiply: int
    transpose: int = 0

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.multiply + self.transpose + 1

    def limit_registers(self, role: Literal["copy", "transpose", "multiply"]) -> None:
        """Gives a thread the registers of its role; two warpgroups keep what they have."""
        if self in _REGISTERS:
            registers = _REGISTERS[self][("copy", "transpose", "multiply").index(role)]
            plgpu.set_max_registers(registers, action="increase" if role == "multiply" else "decrease")


class Place(NamedTuple):
    """Where a tile stands.

    Attributes:
        part: Which of several results; None where there is one.
        entry: Entry of the stack; None without one.
        row: First row.
        column: First column.
        valid: How many rows of the result the tile has, where that is known on the GPU only; None where it follows
            from the result's shape.
    """

    part: Any
    entry: Any
    row: Any
    column: Any
    valid: Any = None


@dataclass(frozen=True)
class Walk:
    """How the blocks of a launch walk the tiles of a result: block i takes tiles i, i + blocks, i + 2 blocks, ...

    Attributes:
        stack: Axes in front of the rows and columns of the result.
        row_tiles: Tiles along the rows.
        column_tiles: Tiles along the columns.
        tile_rows: Rows of a tile.
        tile_columns: Columns of a tile.
        group: Tiles along the rows that are walked before the next column.
        most_blocks: Blocks that are launched at most; 0 for one for each tile.
        parts: Results of this kind one after the other, such as shards of K; None where there is one.
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
        """Blocks that are launched."""
        return min(self.tiles, self.most_blocks) if self.most_blocks else self.tiles

    @property
    def most_turns(self) -> int:
        """Tiles of the block that has most."""
        return -(-self.tiles // self.blocks)

    def count(self, block: Any) -> Any:
        """Returns how many tiles a block has."""
        return lax.div(self.tiles - block + self.blocks - 1, self.blocks)

    def place(self, block: Any, tile: Any) -> Place:
        """Returns where a block's tile of that number stands."""
        index, part, entry, area = block + tile * self.blocks, None, None, self.row_tiles * self.column_tiles
        if self.parts is not None:
            part, index = lax.div(index, self.tiles // self.parts), lax.rem(index, self.tiles // self.parts)
        if self.stack:
            entry = lax.div(index, area)
        if self.stack or self.parts is not None:
            index = lax.rem(index, area)
        # Bands of `group` rows, so that blocks that run together share operands in the L2 cache.
        band = lax.div(index, self.group * self.column_tiles)
        inside = lax.rem(index, self.group * self.column_tiles)
        height = jnp.minimum(self.row_tiles - band * self.group, self.group)
        row, column = band * self.group + lax.rem(inside, height), lax.div(inside, height)
        return Place(part, entry, row * self.tile_rows, column * self.tile_columns)


class Turns(Protocol):
    """What the number of stages depends on."""

    @property
    def most_turns(self) -> int:
        """Tiles of the block that has most."""


@dataclass(frozen=True)
class Ring:
    """The stages of a block, which are filled and emptied in turn.

    Attributes:
        stages: Number of stages.
        steps: Stages that a tile takes, one after the other; 0 where only the GPU knows it.
    """

    stages: int
    steps: int = 0

    @classmethod
    def of(cls, walk: "Turns", steps: int, most_stages: int, multiple: int = 1) -> "Ring":
        """Returns the ring for tiles of so many steps; it has no stage that no block would use."""
        used = -(-steps * walk.most_turns // multiple) * multiple
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
            empty: Barriers at which the stages are given back.
            begin: Returns what is known of a tile.
            copy: Gets that, the tile, the step and the stage; starts the copies into it.
        """

        @pl.loop(0, count)
        def _(tile: Any) -> None:
            place = begin(tile)

            @pl.loop(0, self.steps)
            def _(step: Any) -> None:
                self.fill(tile * self.steps + step, empty, lambda slot: copy(place, tile, step, slot))

        self.drain(count * self.steps, empty)

    def fill(self, position: Any, empty: Any, copy: Callable[[Any], None]) -> None:
        """Fills the stage of a position as soon as it is empty; `copy` gets the stage."""
        slot = self.at(position)

        @pl.when(position >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        copy(slot)

    def drain(self, total: Any, empty: Any) -> None:
        """Waits until the last stages of `total` are empty: every signal is awaited."""

        @pl.loop(0, jnp.minimum(total, self.stages))
        def _(i: Any) -> None:
            plgpu.barrier_wait(empty.at[self.at(jnp.maximum(total - self.stages, 0) + i)])


def sum_steps(
    first: Any,
    last: Any,
    multiply: Callable[[Any], None],
    release: Callable[[Any], None],
    *,
    products: int,
    several: bool = True,
) -> None:
    """Sums the steps of a chain: the products of one are awaited when those of the next one have been issued.

    Args:
        first: The first step.
        last: The end of the steps.
        multiply: Waits for a step's stage and issues its products.
        release: Gives a step's stage back.
        products: Products of a step.
        several: Whether there may be more than one step.
    """

    def overlap(step: Any) -> None:
        multiply(step)
        plgpu.wgmma_wait(products)
        release(step - 1)

    multiply(first)
    if several:
        pl.loop(first + 1, last)(overlap)
    plgpu.wgmma_wait(0)
    release(last - 1)


def here() -> tuple[Any, Any]:
    """Returns the warpgroup and the block that run."""
    return lax.axis_index("warpgroup"), lax.axis_index("block")
