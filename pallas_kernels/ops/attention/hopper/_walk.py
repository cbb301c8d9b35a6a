"""How a computing warpgroup walks the key blocks of 64 queries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitAttentionContract
from pallas_kernels.ops.attention.hopper._online import Stats, no_keys, weigh
from pallas_kernels.ops.attention.hopper._sight import Blocks
from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, accumulator, across, add_lanes, clean_rows, filled

State = tuple[jax.Array, jax.Array, jax.Array]
"""Values (64, H), maximum (64,) and total (64,)."""


@dataclass(frozen=True)
class Ring:
    """Stages of keys and values in shared memory, filled by the producer in the order of the blocks.

    Attributes:
        stages: Number of stages of each.
        keys: (stages, block, H).
        values: (stages, block, H).
        keys_full: A barrier for each stage.
        values_full: The same.
        keys_free: The same.
        values_free: The same.
        marks: (block,) float32, 1 for values of the last block cleaned that were not finite, 0 for others.
        found: (4,) int32, nonzero in any place if there is such a value.
    """

    stages: int
    keys: Any
    values: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any
    marks: Any
    found: Any

    def slot(self, position: Any) -> Any:
        return lax.rem(position, self.stages)

    def fill(self, position: Any, copy_keys: Callable[..., None], copy_values: Callable[..., None]) -> None:
        """Waits until a stage is free and starts to fill it, keys first."""
        slot = self.slot(position)
        for free, full, target, copy in (
            (self.keys_free, self.keys_full, self.keys, copy_keys),
            (self.values_free, self.values_full, self.values, copy_values),
        ):
            pl.when(position >= self.stages)(partial(plgpu.barrier_wait, free.at[slot]))
            copy(target.at[slot], full.at[slot])

    def drain(self, filled_stages: Any) -> None:
        """Waits until what was filled last is free: every signal is awaited."""

        @pl.loop(0, jnp.minimum(filled_stages, self.stages))
        def _(i: Any) -> None:
            slot = self.slot(jnp.maximum(filled_stages - self.stages, 0) + i)
            plgpu.barrier_wait(self.keys_free.at[slot])
            plgpu.barrier_wait(self.values_free.at[slot])


@dataclass(frozen=True)
class Walk:
    """The walk of a warpgroup over the blocks of one tile.

    Attributes:
        contract: Order of the sums.
        factor: Factor of raw scores.
        queries: Shared memory (64, H).
        ring: Where the blocks are.
        position: Position in the ring of the first block of the tile.
        blocks: The blocks of the tile, the same for all warpgroups that share the ring.
        mask: Maps scores and the index of their block to scores with -inf.
        cleans: Whether this warpgroup zeroes values that would spoil others: those that share a ring leave it to the
            last one, whose `turn` lies before the others multiply by them.
        turn: Ends this warpgroup's turn at the tensor core and waits for the next; it runs its argument meanwhile.
        after_scores: Called when the queries have been read for the last time.
        windowed: Whether blocks before the whole ones are masked.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """

    contract: SplitAttentionContract
    factor: float
    queries: Any
    ring: Ring
    position: Any
    blocks: Blocks
    mask: Callable[[jax.Array, Any], jax.Array]
    cleans: Any
    turn: Callable[[Callable[[], None]], None]
    after_scores: Callable[[], None]
    windowed: bool
    interpret: bool

    @property
    def size(self) -> int:
        """Width of a head."""
        width: int = self.queries.shape[1]
        return width

    def fresh(self) -> State:
        """Returns the state before any key."""
        return filled((ROWS, self.size), 0), *no_keys()

    def slot(self, block: Any) -> Any:
        """Returns the stage of a block."""
        return self.ring.slot(self.position + (block - self.blocks.first))

    def wait_for_keys(self, block: Any) -> None:
        plgpu.barrier_wait(self.ring.keys_full.at[self.slot(block)])

    def split(self, first: Any, end: Any, meanwhile: Callable[[], tuple[Callable[[], None], Any]]) -> tuple[State, Any]:
        """Walks the blocks of one split; the keys of its first block have arrived.

        Args:
            first: First block, less than `end`.
            end: End of the blocks.
            meanwhile: Called before the first product; what it returns first is called while the product runs, what
                it returns second is handed back.

        Returns:
            The state of the split, lanes added, and what `meanwhile` handed back.
        """
        later, extra = meanwhile()
        state = self._block(first, self.fresh(), masked=True, later=later)
        begin = first + 1
        if self.windowed:
            whole = jnp.clip(self.blocks.whole_first, begin, jnp.maximum(end, begin))
            state = lax.fori_loop(begin, whole, partial(self._block, masked=True), state)
            begin = whole
        whole = jnp.maximum(jnp.minimum(self.blocks.whole_last, end), begin)
        state = lax.fori_loop(begin, whole, partial(self._block, masked=False), state)
        values, maximum, total = lax.fori_loop(whole, end, partial(self._block, masked=True), state)
        return (values, maximum, add_lanes(total, self.interpret)), extra

    def _block(self, block: Any, state: State, *, masked: bool, later: Callable[[], None] | None = None) -> State:
        """Takes one block into the state."""
        values, *stats = state
        math = Arithmetic(interpret=self.interpret)
        in_part = masked & ((block < self.blocks.whole_first) | (block >= self.blocks.whole_last))
        cleaned = self._clean(block, in_part) if masked else False
        scores = self._scores(block, later)
        plgpu.barrier_arrive(self.ring.keys_free.at[self.slot(block)])
        pl.when(block + 1 == self.blocks.last)(self.after_scores)
        if masked:
            scores = self.mask(scores, block)
        new, decay, weights = weigh(scores, Stats(*stats), self.factor, self.contract, math)
        if later is None:
            values = values * across(decay, self.size)
        rounded = weights.astype(self.ring.values.dtype)
        values, new, rounded = lax.optimization_barrier((values, new, rounded))

        def wait() -> None:
            arrival = partial(plgpu.barrier_wait, self.ring.values_full.at[self.slot(block)])
            if masked:
                pl.when(jnp.logical_not(cleaned))(arrival)
            else:
                arrival()

        self.turn(wait)
        if masked:
            new = new._replace(total=self._spoil(block, in_part, new.total))
        values = self._add_values(values, rounded, block)
        plgpu.barrier_arrive(self.ring.values_free.at[self.slot(block)])
        return values, *new

    def _clean(self, block: Any, in_part: Any) -> Any:
        """Zeroes values of a block that some queries do not see, where a weight of zero would keep nan and infinities.

        Returns:
            Whether the block's values have been waited for.
        """
        cleaned = self.cleans & in_part

        @pl.when(cleaned)
        def _() -> None:
            slot, start = self.slot(block), block * self.contract.key_block
            plgpu.barrier_wait(self.ring.values_full.at[slot])
            first, end = self.blocks.start - start, self.blocks.end - start
            clean_rows(self.ring.values.at[slot], first, end, self.ring.marks, self.ring.found, self.interpret)
            plgpu.commit_smem()

        return cleaned

    def _spoil(self, block: Any, in_part: Any, total: jax.Array) -> jax.Array:
        """Returns the total with nan for queries that see a value of which `_clean` made zeros."""
        found = self.ring.found
        some = in_part & ((found[0] | found[1] | found[2] | found[3]) != 0)

        def spoiled() -> jax.Array:
            marks = plgpu.load(self.ring.marks, layout=TILE.reduce(0), optimized=False)
            seen = self.mask(lax.broadcast_in_dim(marks, (ROWS, self.contract.key_block), [1]), block)
            return jnp.where(seen.max(axis=1) > 0, jnp.nan, total)

        found_total: jax.Array = lax.cond(some, spoiled, lambda: total)
        return found_total

    def _scores(self, block: Any, later: Callable[[], None] | None) -> jax.Array:
        """Returns the raw scores (64, block)."""

        def multiply(scores: Any) -> jax.Array:
            plgpu.wgmma(scores, self.queries, self.ring.keys.at[self.slot(block)].transpose((1, 0)))
            self.turn(lambda: None)
            if later is not None:
                later()
            product: jax.Array = scores[...]
            return product

        found: jax.Array = pl.run_scoped(multiply, accumulator(ROWS, self.contract.key_block))
        return found

    def _add_values(self, values: jax.Array, weights: jax.Array, block: Any) -> jax.Array:
        """Returns values + weights @ the block's values, and waits for the next block's keys meanwhile."""
        stored = self.ring.values.at[self.slot(block)]

        def wait_for_next() -> None:
            pl.when(block + 1 < self.blocks.last)(lambda: self.wait_for_keys(block + 1))

        if self.interpret:
            # The interpreter takes neither an accumulator's start nor an operand in registers.
            wait_for_next()
            read = stored[...]
            plgpu.commit_smem()  # an ordinary read, before the copy engine writes again
            return values + jnp.dot(weights.astype(jnp.float32), read.astype(jnp.float32))

        def multiply(total: Any) -> jax.Array:
            total[...] = values
            plgpu.wgmma(total, weights, stored)
            wait_for_next()
            product: jax.Array = total[...]
            return product

        found: jax.Array = pl.run_scoped(multiply, accumulator(*values.shape))
        return found
