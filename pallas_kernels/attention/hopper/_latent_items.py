"""The items of latent attention: tiles of 64 rows, each with one split or all of its keys."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import Blocks, MaskBounds
from pallas_kernels.attention.hopper._merge_loop import MERGED_ROWS
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.schedule.hopper_latents import LatentSchedule
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.parts.hopper.tile import ROW, ROWS

_ROWS = 8  # TMA reads tiles of so many rows
_NEVER = 30  # no sequence has 2 ** 30 keys


class Item(NamedTuple):
    """One tile of rows, with one split or all of its keys.

    Attributes:
        sequence: Index of the sequence.
        tile: Index of the tile among those of the sequence.
        split: Index of the split, 0 with all keys.
        blocks: The blocks of keys, none if the last is not above the first; of all keys, at least one.
    """

    sequence: Any
    tile: Any
    split: Any
    blocks: Blocks


@dataclass(frozen=True)
class Items:
    """The items of a launch, with what is fixed about it.

    A row is a query with one of its heads, query-major.

    Attributes:
        contract: Order of the sums.
        schedule: The schedule.
        factor: Factor of the scores, in units of ln(2).
        mask_bounds: The mask bounds.
        source: Where keys come from.
        batch: Sequences.
        queries: Queries of each.
        heads: Heads of a query.
        size: Width of a latent.
        value_size: Its columns that are values.
        capacity: Most keys of a sequence.
        interpret: False, or parameters of Mosaic's interpreter.
    """

    contract: MmaAttentionContract
    schedule: LatentSchedule
    factor: float
    mask_bounds: MaskBounds
    source: KeySource
    batch: int
    queries: int
    heads: int
    size: int
    value_size: int
    capacity: int
    interpret: Any

    @property
    def unit(self) -> float:
        """Unit of 8-bit values, of which there are none."""
        return 1.0

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads

    def leads_outside(self, table: Any, sequence: Any, keys: Any) -> jax.Array | None:
        """Returns whether the page table of a sequence leads outside of the cache; None without pages."""
        if table is None:
            return None
        return self.source.leads_outside(table, sequence, jnp.minimum(keys, self.capacity), bool(self.interpret))

    @property
    def rows(self) -> int:
        """Rows of a sequence."""
        return self.queries * self.heads

    @property
    def tiles(self) -> int:
        """Tiles of a sequence."""
        return -(-self.rows // ROWS)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of the halves of the values, and the others of a latent."""
        return self.value_size // 2, self.value_size // 2, self.size - self.value_size

    @property
    def padded(self) -> int:
        """Rows of a sequence in arrays of what items with one split give."""
        return -(-self.rows // MERGED_ROWS) * MERGED_ROWS

    @property
    def loaded(self) -> int:
        """Rows of a tile that are copied; the others are never read by what is stored."""
        return min(ROWS, -(-self.rows // _ROWS) * _ROWS)

    @property
    def blocks_of_split(self) -> int:
        """Blocks of keys of a split."""
        return self.contract.split // self.contract.key_block

    @property
    def splits(self) -> int:
        """Splits of the capacity."""
        return -(-self.capacity // self.contract.split)

    @property
    def count(self) -> int:
        """Items of all blocks of the grid."""
        return self.batch * self.tiles * (1 if self.schedule.whole else self.splits)

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return min(self.schedule.blocks, self.count)

    def count_of(self, lengths: Lengths, block: Any) -> Any:
        """Returns the number of items of a block of the grid.

        A zero that compilers do not know keeps the loop over items if there is one for each block: without it, ptxas
        would not compute the descriptors of operands in uniform registers. Were it 1, each would do an item twice.
        """
        unknown = jnp.clip(lengths.keys[0], 0, 1 << _NEVER) >> _NEVER
        return lax.div(self.count - 1 - block + self.grid, self.grid) + unknown

    def item(self, lengths: Lengths, block: Any, index: Any) -> Item:
        """Returns an item of a block of the grid: tiles with the last queries first."""
        number = jnp.minimum(block + index * self.grid, self.count - 1)
        if self.schedule.whole:
            rest, sequence = lax.div(number, self.batch), lax.rem(number, self.batch)
            tile = self.tiles - 1 - rest
            return Item(sequence, tile, jnp.int32(0), self._of_tile(lengths, sequence, tile))
        # The tiles of a split follow one another: they read the same keys.
        rest, tile = lax.div(number, self.tiles), lax.rem(number, self.tiles)
        sequence, split = lax.rem(rest, self.batch), lax.div(rest, self.batch)
        seen = self._of_sequence(lengths, sequence)
        length, some = self.blocks_of_split, lengths.queries[sequence] > 0
        start = split * length
        end = jnp.where(some, jnp.minimum(start + length, seen.last), start)
        return Item(sequence, tile, split, seen._replace(first=start, last=end))

    def splits_seen(self, offset: Any, queries: Any, keys: Any) -> tuple[Any, Any]:
        """Returns the first and the end of the splits of a sequence that are computed, if items have one each."""
        keys = jnp.minimum(keys, self.capacity)
        seen = self.mask_bounds.blocks(offset, offset + (self.queries - 1), keys, self.contract.key_block)
        length = self.blocks_of_split
        end = jnp.minimum(lax.div(seen.last + (length - 1), length), self.splits)
        return jnp.int32(0), jnp.where(queries > 0, end, 0)

    def of_split(self, item: Item, split: Any) -> tuple[Any, Any]:
        """Returns the first and the end of the blocks of a split of an item."""
        length = self.blocks_of_split
        return jnp.maximum(item.blocks.first, split * length), jnp.minimum(item.blocks.last, (split + 1) * length)

    def query_of_rows(self, item: Item) -> jax.Array:
        """Returns the query of each row of a tile, (64,) int32."""
        row = item.tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        return lax.div(row, jnp.full_like(row, self.heads))

    def keys_of(self, lengths: Lengths, sequence: Any) -> Any:
        """Returns the keys of a sequence, no more than there is room for."""
        return jnp.minimum(lengths.keys[sequence], self.capacity)

    def rows_left(self, lengths: Lengths, item: Item) -> Any:
        """Returns how many rows from the first one of a tile on are of queries; may be negative."""
        return jnp.minimum(self.queries, lengths.queries[item.sequence]) * self.heads - item.tile * ROWS

    def _of_sequence(self, lengths: Lengths, sequence: Any) -> Blocks:
        offset, keys = lengths.offsets[sequence], self.keys_of(lengths, sequence)
        return self.mask_bounds.blocks(offset, offset + (self.queries - 1), keys, self.contract.key_block)

    def _of_tile(self, lengths: Lengths, sequence: Any, tile: Any) -> Blocks:
        offset, keys = lengths.offsets[sequence], self.keys_of(lengths, sequence)
        first = lax.div(tile * ROWS, self.heads)
        last = lax.div(jnp.minimum(tile * ROWS + (ROWS - 1), self.rows - 1), self.heads)
        blocks = self.mask_bounds.blocks(offset + first, offset + last, keys, self.contract.key_block)
        # After the sequence's last query nothing is seen; one fully masked block is processed.
        some = first < lengths.queries[sequence]
        return blocks._replace(last=jnp.where(some, blocks.last, blocks.first + 1))
