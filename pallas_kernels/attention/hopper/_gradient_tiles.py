"""Which tiles of queries a block of keys is seen by, and the order in which blocks of the grid take their work."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.schedule.gradient_order import HEAD_BITS, Work
from pallas_kernels.parts.hopper.tile import ROW, ROWS

_HEADS: Final = (1 << HEAD_BITS) - 1


class Item(NamedTuple):
    """Work of a block of the grid: a block of keys of a key head, with all query heads that share it or some of them.

    Attributes:
        sequence: Index of the sequence.
        head: Index of the key head.
        block: Index of the block of keys.
        first: First tile of queries that sees any of the keys.
        count: Number of those tiles.
        whole_first: First tile of queries that see all of the keys.
        whole_end: End of those tiles, at least `whole_first`.
        start: First query head of those that share the keys.
        end: End of those query heads.
    """

    sequence: Any
    head: Any
    block: Any
    first: Any
    count: Any
    whole_first: Any
    whole_end: Any
    start: Any
    end: Any

    @property
    def steps(self) -> Any:
        """Tiles of queries of all query heads."""
        return self.count * (self.end - self.start)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a call.

    Attributes:
        mask_bounds: The mask bounds.
        block: Keys of a block.
        rows: Queries of a tile.
        batch: Sequences.
        heads: Key heads.
        group: Query heads per key head.
        queries: Most queries of a sequence.
        keys: Most keys of a sequence.
        grid: Most blocks of the grid.
        together: Key heads whose blocks of keys are taken together.
        to_and_fro: Whether every second round of items goes over the blocks of the grid backwards.
    """

    mask_bounds: MaskBounds
    block: int
    rows: int
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    grid: int
    together: int
    to_and_fro: bool

    @property
    def across(self) -> int:
        """Tiles of queries of a head."""
        return -(-self.queries // self.rows)

    @property
    def blocks(self) -> int:
        """Blocks of keys of a head."""
        return -(-self.keys // self.block)

    @property
    def items(self) -> int:
        """Items of all heads."""
        return self.batch * self.heads * self.blocks

    @property
    def turns(self) -> int:
        """Tiles of queries of all query heads of all sequences."""
        return self.batch * self.heads * self.group * self.across

    @property
    def size(self) -> int:
        """Blocks of the grid."""
        return min(self.grid, self.items)

    @property
    def work(self) -> Work:
        """What there is to do under a causal mask, for as many queries as keys."""
        steps = (self.across - block * self.block // self.rows for block in range(self.blocks))
        return Work(self.batch * self.heads, self.group, tuple(steps), self.size)

    @property
    def rounds(self) -> int:
        """Rounds in which each block of the grid takes an item; the first may have fewer items than blocks."""
        return -(-self.items // self.size)

    def first_round(self, place: Any) -> Any:
        """Returns the first round in which a block of the grid has an item."""
        return jnp.where(self._number(place, 0) < 0, 1, 0)

    def item(self, lengths: Lengths, place: Any, index: Any) -> Item:
        """Returns an item of a block of the grid.

        The last block of keys of a head comes first: it adds to the gradients of queries before the others, which wait
        for it. An item waits only for items with smaller numbers, so the grid cannot come to a standstill. Under a
        causal mask the first items are the shortest ones, so the round that is not full comes first.
        """
        every = self.batch * self.heads
        heads: Any = min(self.together, every)
        number = self._number(place, index)
        start = lax.div(number, heads * self.blocks) * heads
        number = lax.rem(number, heads * self.blocks)
        heads = jnp.minimum(every - start, heads)
        block, head = self.blocks - 1 - lax.div(number, heads), start + lax.rem(number, heads)
        return self._item(lengths, block, head, 0, self.group)

    def part(self, lengths: Lengths, code: Any) -> Item:
        """Returns the part of an item that a number of a `GradientOrder` stands for."""
        every = self.batch * self.heads
        number = lax.shift_right_logical(code, 2 * HEAD_BITS)
        start = lax.shift_right_logical(code, HEAD_BITS) & _HEADS
        block, head = self.blocks - 1 - lax.div(number, every), lax.rem(number, every)
        return self._item(lengths, block, head, start, (code & _HEADS) + 1)

    def number(self, item: Item) -> Any:
        """Returns the number of an item: the last block of all heads comes first."""
        every = self.batch * self.heads
        return (self.blocks - 1 - item.block) * every + item.sequence * self.heads + item.head

    def _item(self, lengths: Lengths, block: Any, head: Any, start: Any, stop: Any) -> Item:
        sequence = lax.div(head, self.heads)
        first, end = self.seen_by(lengths, sequence, block)
        end = jnp.maximum(end, first)
        whole_first, whole_end = self.whole(lengths, sequence, block)
        whole_end = jnp.minimum(whole_end, end)
        some = whole_first < whole_end
        whole_first, whole_end = jnp.where(some, whole_first, end), jnp.where(some, whole_end, end)
        return Item(
            sequence,
            lax.rem(head, self.heads),
            block,
            first,
            count=end - first,
            whole_first=whole_first,
            whole_end=whole_end,
            start=start,
            end=stop,
        )

    def _number(self, place: Any, index: Any) -> Any:
        return index * self.size + self._to_and_fro(index, place) - (self.rounds * self.size - self.items)

    def _to_and_fro(self, index: Any, place: Any) -> Any:
        """Returns the place of a block of the grid in a round of items."""
        return jnp.where((lax.rem(index, 2) == 1) & self.to_and_fro, self.size - 1 - place, place)

    def seen_by(self, lengths: Lengths, sequence: Any, block: Any) -> tuple[Any, Any]:
        """Returns the tiles of queries, from the first to the end, that see any key of a block."""
        offset, start = lengths.offsets[sequence], block * self.block
        end = lax.div(lengths.queries[sequence] + (self.rows - 1), self.rows)
        first = jnp.int32(0)
        if self.mask_bounds.after is not None:  # the last query of the tile sees the first key
            first = lax.div(jnp.maximum(start - self.mask_bounds.after - offset, 0), self.rows)
        if self.mask_bounds.before is not None:  # the first query of the tile sees the last key
            reach = start + (self.block - 1 + self.mask_bounds.before) - offset
            end = jnp.minimum(end, jnp.where(reach >= 0, lax.div(jnp.maximum(reach, 0), self.rows) + 1, 0))
        return first, jnp.where(start < lengths.keys[sequence], end, first)

    def last_block(self, offset: Any, keys: Any, tile: Any) -> Any:
        """Returns the last block of keys that a tile of queries sees any key of."""
        last = lax.div(keys + (self.block - 1), self.block) - 1
        if self.mask_bounds.after is None:
            return last
        return jnp.minimum(
            last, lax.div(offset + tile * self.rows + (self.rows - 1 + self.mask_bounds.after), self.block)
        )

    def first_block(self, offset: Any, tile: Any) -> Any:
        """Returns the first block of keys that a tile of queries sees any key of."""
        if self.mask_bounds.before is None:
            return jnp.int32(0)
        return lax.div(jnp.maximum(offset + tile * self.rows - self.mask_bounds.before, 0), self.block)

    def blocks_of_tiles(self, lengths: Lengths) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last block of keys of all tiles of queries (B, tiles), for arrays of lengths.

        The last one lies before the first where a tile sees nothing.
        """
        tile = jnp.arange(self.across, dtype=jnp.int32)

        def of_sequence(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
            offset, queries, keys = numbers
            first, last = jax.vmap(lambda t: (self.first_block(offset, t), self.last_block(offset, keys, t)))(tile)
            return first, jnp.where(tile * self.rows < queries, last, -1)

        return jax.vmap(of_sequence)(lengths.numbers)

    def whole(self, lengths: Lengths, sequence: Any, block: Any) -> tuple[Any, Any]:
        """Returns the tiles of queries, from the first to the end, that see all keys of a block."""
        offset, start = lengths.offsets[sequence], block * self.block
        first = jnp.int32(0)
        end = lax.div(lengths.queries[sequence], self.rows)
        if self.mask_bounds.after is not None:  # the first query of the tile sees the last key
            first = jnp.maximum(start + (self.block - 1 - self.mask_bounds.after) - offset, 0)
            first = lax.div(first + (self.rows - 1), self.rows)
        if self.mask_bounds.before is not None:  # the last query of the tile sees the first key
            reach = jnp.maximum(start + (self.mask_bounds.before + 1) - offset, 0)
            end = jnp.minimum(end, lax.div(reach, self.rows))
        return first, jnp.where(start + self.block <= lengths.keys[sequence], end, first)

    def seen(self, lengths: Lengths, item: Item, tile: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last query of a tile that sees each of 64 keys of a block, (64,) int32."""
        key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        start, query = item.block * self.block + part * ROWS, tile * self.rows
        position = lengths.offsets[item.sequence] + query
        first = key - ROWS  # no limit; a plain number has no layout
        last = jnp.zeros_like(key) + (lengths.queries[item.sequence] - query - 1)
        if self.mask_bounds.after is not None:
            first = key + (start - position - self.mask_bounds.after)
        if self.mask_bounds.before is not None:
            last = jnp.minimum(last, key + (start - position + self.mask_bounds.before))
        return first, jnp.where(key < lengths.keys[item.sequence] - start, last, -1)
