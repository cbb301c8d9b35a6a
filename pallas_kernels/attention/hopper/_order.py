"""The tiles of the kernel for many queries, and the order in which blocks of the grid take them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._setup import Setup
from pallas_kernels.attention.schedule.hopper import PrefillSchedule
from pallas_kernels.parts.hopper.tile import ROWS


class Tile(NamedTuple):
    """Work of the warpgroups of a block with the same keys: a sequence, a set of heads, the first of its units."""

    sequence: Any
    heads: Any
    unit: Any


class Unit(NamedTuple):
    """Work of one warpgroup: 64 queries of a head."""

    sequence: Any
    head: Any
    first: Any


@dataclass(frozen=True)
class Order:
    """The tile scheduler: back and forth over the blocks, heads in groups, the last queries first.

    A tile has one unit per warpgroup. The units of a set of heads (one head or all that share a key head) are numbered
    from the last queries on, heads first, so that the units of a tile see about the same number of keys.
    """

    setup: Setup
    schedule: PrefillSchedule

    @property
    def together(self) -> int:
        """Query heads of a set."""
        return self.setup.group if self.schedule.packed else 1

    @property
    def pieces(self) -> int:
        """Units of a query head; whole tiles of one head, whose last queries then end with a block of keys."""
        multiple = self.schedule.warpgroups if self.together == 1 else 1
        return -(-self.setup.queries // (ROWS * multiple)) * multiple

    @property
    def units(self) -> int:
        """Units of a set of heads."""
        return self.pieces * self.together

    @property
    def padded(self) -> int:
        """Queries of a sequence, including the padding units of tiles."""
        return (self.pieces + (1 if self.units % self.schedule.warpgroups else 0)) * ROWS

    @property
    def across(self) -> int:
        """Tiles of a set of heads."""
        return -(-self.units // self.schedule.warpgroups)

    @property
    def sets(self) -> int:
        """Sets of heads of a sequence."""
        return self.setup.heads // self.together

    @property
    def tiles(self) -> int:
        """Tiles of all heads."""
        return self.setup.batch * self.sets * self.across

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return min(self.schedule.blocks, self.tiles)

    def count(self, block: Any) -> Any:
        """Returns the number of tiles of a block."""
        whole, rest = divmod(self.tiles, self.blocks)
        return whole + jnp.where(self._place(whole, block) < rest, 1, 0)

    def tile(self, block: Any, index: Any) -> Tile:
        """Returns a block's tile."""
        every = self.setup.batch * self.sets
        heads: Any = min(-(-self.schedule.heads // self.together) or every, every)
        number = index * self.blocks + self._place(index, block)
        start = lax.div(number, heads * self.across) * heads
        number = lax.rem(number, heads * self.across)
        heads = jnp.minimum(every - start, heads)
        row, head = lax.div(number, heads), start + lax.rem(number, heads)
        return Tile(lax.div(head, self.sets), lax.rem(head, self.sets), row * self.schedule.warpgroups)

    def unit(self, tile: Tile, warpgroup: Any) -> Unit:
        """Returns a warpgroup's unit of a tile; units past the end have no valid queries."""
        number, together = tile.unit + warpgroup, self.together
        first = jnp.where(number < self.units, self._first(number), self.pieces * ROWS)
        return Unit(tile.sequence, tile.heads * together + lax.rem(number, together), first)

    def key_head(self, tile: Tile) -> Any:
        """Returns the key head of a tile."""
        return lax.div(tile.heads * self.together, self.setup.group)

    def queries(self, tile: Tile) -> tuple[Any, Any]:
        """Returns the first and the last query of a tile."""
        end = jnp.minimum(tile.unit + self.schedule.warpgroups, self.units)
        return self._first(end - 1), self._first(tile.unit) + (ROWS - 1)

    def _first(self, unit: Any) -> Any:
        return (self.pieces - 1 - lax.div(unit, self.together)) * ROWS

    def _place(self, index: Any, block: Any) -> Any:
        return jnp.where(lax.rem(index, 2) == 0, block, self.blocks - 1 - block)
