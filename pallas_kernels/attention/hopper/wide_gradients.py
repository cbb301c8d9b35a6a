"""The gradients of attention with wide heads: a block of 64 keys at a time, half of the columns for each warpgroup.

The gradients of keys and values of 64 keys fill the registers of two warpgroups. Both compute the scores of all keys,
so that neither waits for the other; each multiplies its own columns. Everything else is as with narrow heads.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._gradient_scratch import rounds_of
from pallas_kernels.attention.hopper._gradient_steps import NEVER, PARTS, STATS, Operands, Results, Step
from pallas_kernels.attention.hopper._gradient_tiles import Item
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.gradients import Ahead, Body, zero_rows
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.stages import await_free
from pallas_kernels.parts.hopper.tile import ROWS, TILE, filled


@dataclass(frozen=True)
class WideBody(Body):
    """The kernel's program."""

    @property
    def rounds(self) -> int:
        """Pieces of the gradient of a tile's queries that a warpgroup passes on per step."""
        return rounds_of(self.call)

    def place(self, part: Any, index: int) -> tuple[Any, Any]:
        """Returns the first query and the columns that a warpgroup passes on in a round."""
        width = self.call.size // PARTS // self.rounds
        return 0, pl.ds((part * self.rounds + index) * width, width)

    def start(self, first: Ahead, scratch: Any) -> tuple[jax.Array, ...]:
        """Returns the initial state of the steps of an item: gradients of keys and values."""
        return filled((ROWS, self.call.size // PARTS), 0), filled((ROWS, self.call.value_size // PARTS), 0)

    def end(self, last: Step, results: Results, scratch: Any) -> None:
        """Passes on what is left after the last step of an item: nothing."""

    def keys_of(self, part: Any) -> Any:
        """Returns which 64 keys of a block a warpgroup has: all of them."""
        return part * 0

    def rings(self, scratch: Any) -> tuple[tuple[Any, int], ...]:
        """Returns the barriers of free stages of what is fetched for each tile of queries, and how many there are."""
        few = self.schedule.cotangent_stages
        return (scratch.queries_free, self.schedule.stages), (scratch.cotangents_free, few)

    def fetch_keys(self, given: Operands, item: Item, scratch: Any) -> None:
        """Starts the copies of the keys, values and marks of an item."""
        own = pl.ds(item.block * self.tiles.block, self.tiles.block)
        _copy_halves(given.key.at[item.sequence, own, item.head], scratch.keys, scratch.cache_full)
        _copy_halves(given.value.at[item.sequence, own, item.head], scratch.values, scratch.cache_full)
        plgpu.copy_gmem_to_smem(
            given.marks.at[item.sequence, item.head, own], self.marks(0, scratch), scratch.cache_full
        )

    def fetch_queries(self, given: Operands, item: Item, head: Any, index: Any, at: Any, scratch: Any) -> None:
        """Starts the copies of a tile of queries, with its cotangents and numbers, into the stages of a position."""
        rows = pl.ds(index * self.tiles.rows, self.tiles.rows)
        stages, few = self.schedule.stages, self.schedule.cotangent_stages
        slot = lax.rem(at, stages)
        await_free(at, stages, scratch.queries_free.at[slot])
        full = scratch.queries_full.at[slot]
        numbers = scratch.numbers.at[pl.ds(slot * STATS, STATS)]
        plgpu.copy_gmem_to_smem(given.stats.at[item.sequence, head, :, rows], numbers, full)
        _copy_halves(given.query.at[item.sequence, rows, head], scratch.queries.at[slot], full)
        slot = lax.rem(at, few)
        await_free(at, few, scratch.cotangents_free.at[slot])
        source, full = given.cotangent.at[item.sequence, rows, head], scratch.cotangents_full.at[slot]
        _copy_halves(source, scratch.cotangents.at[slot], full)

    def zero_fill_keys(self, part: Any, scratch: Any) -> None:
        """Zero-fills keys that are not finite, since zero slopes would not mask them."""
        marks = plgpu.load(self.marks(0, scratch), layout=TILE.reduce(1), optimized=False)
        bad = jnp.where(marks == 1, 1.0, 0.0)
        for index in range(self.rounds):
            zero_rows(scratch.keys.at[part * self.rounds + index], bad)
        plgpu.commit_smem()
        self.meet(scratch)

    def zero_fill_queries(self, step: Step, scratch: Any) -> None:
        """Zero-fills queries and cotangents of rows with non-finite numbers: half of the columns each."""
        numbers = (
            plgpu.load(scratch.numbers.at[step.slot * STATS + number], layout=TILE.reduce(1), optimized=False)
            for number in range(STATS - 1)
        )
        bad: Any = sum(jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0) for x in numbers)
        zero_rows(scratch.queries.at[step.slot, step.part], bad)
        zero_rows(scratch.cotangents.at[self.cotangent_slot(step), step.part], bad)
        plgpu.commit_smem()
        self.meet(scratch)

    def cotangent_slot(self, step: Step) -> Any:
        """Returns the stage of the cotangents of a step."""
        return lax.rem(step.position, self.schedule.cotangent_stages)

    def one_step(
        self,
        step: Step,
        ahead: Ahead,
        lengths: Lengths,
        results: Results,
        scratch: Any,
        dk: Any,
        dv: Any,
        scores: Any = None,
    ) -> tuple[jax.Array, ...]:
        """Takes a tile of queries, and hands on what it gives to them.

        Returns:
            `dk` and `dv` with what the tile adds.
        """
        interpret, dtype, other = bool(self.call.interpret), scratch.queries.dtype, self.cotangent_slot(step)
        plgpu.barrier_wait(scratch.queries_full.at[step.slot])
        plgpu.barrier_wait(scratch.cotangents_full.at[other])
        not_zero_filled = step.masked & (scratch.numbers[step.slot * STATS + 2, 0] != 0)
        pl.when(not_zero_filled)(lambda: self.zero_fill_queries(step, scratch))
        # A zero opaque to ptxas: constant addresses would be spilled to local memory.
        zero = step.position >> NEVER
        part = step.part + zero
        queries, cotangents = scratch.queries.at[step.slot], scratch.cotangents.at[other]

        def both(x: Any) -> tuple[Any, ...]:
            return tuple(x.at[i + zero] for i in range(x.shape[0]))

        scores = start(None, both(scratch.keys), both(queries), interpret=interpret)
        raised = start(None, both(scratch.values), both(cotangents), interpret=interpret)
        (scores,) = finish(1, scores, interpret=interpret)
        weights, bent = self.weights(step, 0, lengths, scores, scratch)
        rounded = self.math.rounded_not_negative(weights, dtype)
        (raised,) = finish(0, raised, interpret=interpret)
        dv = start(dv, rounded, (cotangents.at[part],), right_along=False, interpret=interpret)
        raised = raised - self.numbers(step, 0, 1, scratch)
        raised = lax.cond(step.masked, lambda x: jnp.where(bent < 0, 0.0, x), lambda x: x, raised)
        slopes = self.math.product(bent, raised).astype(dtype)
        share(slopes, scratch.slopes.at[part], interpret)
        dk = start(dk, slopes, (queries.at[part],), right_along=False, interpret=interpret)
        plgpu.barrier_arrive(scratch.alone.at[part])
        plgpu.barrier_wait(scratch.alone.at[part])
        for index in range(self.rounds):
            sums = start(
                None,
                (scratch.slopes.at[part],),
                (scratch.keys.at[part * self.rounds + index],),
                left_along=False,
                right_along=False,
                interpret=interpret,
            )
            if index == 0:
                (dv,) = finish(2, dv, interpret=interpret)
                plgpu.barrier_arrive(scratch.cotangents_free.at[other])
                dk, sums = finish(0, dk, sums, interpret=interpret)
                plgpu.barrier_arrive(scratch.queries_free.at[step.slot])
            else:
                (sums,) = finish(0, sums, interpret=interpret)
            if interpret:
                self.store_sums(step, index, sums, results, scratch)
            else:
                self.hand_on(step.position, index, part, sums, scratch)
        return dk, dv

    def store(self, item: Item, part: Any, dk: jax.Array, dv: jax.Array, results: Results, scratch: Any) -> None:
        """Writes the gradients of this warpgroup's columns, overwriting the keys and values in shared memory."""
        math, dtype = self.math, scratch.queries.dtype
        dk, dv = math.fused(dk, self.call.scale, 0.0), math.fused(dv, 1.0, 0.0)  # -0 becomes +0
        self.meet(scratch)  # the other warpgroup has read keys and values
        scratch.values.at[part][...] = dv.astype(dtype)
        width = self.call.size // PARTS // self.rounds
        for index in range(self.rounds):
            own = dk[:, index * width : (index + 1) * width]
            scratch.keys.at[part * self.rounds + index][...] = own.astype(dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(item.block * self.tiles.block, ROWS), self.call.value_size // PARTS
        place = results.value.at[item.sequence, rows, item.head, pl.ds(part * columns, columns)]
        plgpu.copy_smem_to_gmem(scratch.values.at[part], place)
        for index in range(self.rounds):
            at = part * self.rounds + index
            place = results.key.at[item.sequence, rows, item.head, pl.ds(at * width, width)]
            plgpu.copy_smem_to_gmem(scratch.keys.at[at], place)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(scratch.cache_free)


def _copy_halves(x: Any, target: Any, full: Any) -> None:
    """Starts the copies of rows whose columns lie in pieces in shared memory."""
    width = target.shape[2]
    for i in range(target.shape[0]):
        plgpu.copy_gmem_to_smem(x.at[:, pl.ds(i * width, width)], target.at[i], full)
