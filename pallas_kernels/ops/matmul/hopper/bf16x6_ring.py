"""The kernel of the Hopper matmul with float32 accuracy: three bfloat16 parts of each operand, six products.

The producer copies tiles into shared memory as in `hopper.ring`. The weights stay float32 in memory: every
computing warpgroup reads a (64, 64) tile into registers, splits it there and multiplies (wgmma takes its rows from
registers). The activations come split.

A block of 64 elements of K is one accumulator that starts at zero, smallest products first; its sum is added in
float32, rounded to nearest, to the sum of its shard. So the tensor core's additions, which truncate, reach no further
than a block. Shards are added upwards, here or by the caller: their sums are the same bits in both forms.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitContract
from pallas_kernels.ops.matmul.hopper.epilogue import Ending, Epilogue, Store, make_store
from pallas_kernels.parts.hopper.operand import SWIZZLE_BYTES, Operand, in_stack, loaded_rows, tile_transforms
from pallas_kernels.parts.hopper.pipeline import COMPUTE_REGISTERS, PRODUCER_REGISTERS, Place, Ring, Walk, here, launch
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.bf16x6 import SplitSchedule
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

BLOCK: Final = 64
"""Elements of K in a block: the bfloat16 elements of a swizzled row, which wgmma reads from registers at once."""

LARGEST_BFLOAT16: Final = 3.3895313892515355e38

_PRODUCTS: Final = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # (part of the weights, part of the activations)
_PARTS: Final = 3
_SWIZZLE: Final = SWIZZLE_BYTES // 4


def split(value: Any, to_bfloat16: Any) -> list[Any]:
    """Returns three bfloat16 arrays whose sum is a float32 array.

    The sum is exact for magnitudes from 2**-110 on; below, the last part is a denormal and the error at most 2**-134.
    What is not finite stands in the last part, which meets only the first part of the other operand: no infinity meets
    a rest that is zero or has the other sign.

    Args:
        value: float32.
        to_bfloat16: Rounds float32 to bfloat16, to nearest even, and gives it as (float32, bfloat16).
    """
    finite = jnp.abs(value) < jnp.inf
    clipped = jnp.clip(
        value, -LARGEST_BFLOAT16, LARGEST_BFLOAT16
    )  # the largest float32 numbers would round to infinity
    high, high_part = to_bfloat16(clipped)
    rest = jnp.where(finite, value - high, 0.0)
    middle, middle_part = to_bfloat16(rest)
    return [high_part, middle_part, jnp.where(finite, rest - middle, value).astype(jnp.bfloat16)]


@in_32_bits
def split_ring_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: SplitContract,
    schedule: SplitSchedule,
    transpose_w: bool,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on operands that the copy engine can address in whole tiles.

    Args:
        x: (M, 3 K') or (B, M, 3 K') bfloat16: for each block of 64 elements of K the 64 high parts, the 64 middle parts
            and the 64 low parts; K' is K rounded up to a block. M below 8 or a multiple of 8.
        w: (K, N), or (N, K) with `transpose_w`, float32; the contiguous dimension a multiple of 32, the other of 8. A
            stack where `x` is one; a matrix `x` beside a stack belongs to every entry.
        contract: Length of a shard.
        schedule: Tiles and stages.
        transpose_w: Whether `w` is stored as (N, K).
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (1, M, N), (1, B, M, N) float32, or the sums of the shards (shards, M, N), (shards, B, M, N) for a schedule in
        parts.
    """
    stack, m, n, s = w.shape[:-2], x.shape[-2], w.shape[-2 if transpose_w else -1], schedule.tiles
    k = w.shape[-1 if transpose_w else -2]
    swizzle = _SWIZZLE if transpose_w else math.gcd(_SWIZZLE, n)
    weights = Operand(n, k, transpose_w, s.block_n, s.block_n, swizzle, BLOCK)
    columns = Operand(m, x.shape[-1], True, s.block_m, loaded_rows(m, s.block_m), BLOCK, _PARTS * BLOCK)
    steps, shards = contract.shard // BLOCK, contract.shards(k)
    parts, in_block = (shards, 1) if schedule.parted else (1, shards)
    walk = Walk(stack, weights.tiles, columns.tiles, s.block_n, s.block_m, s.group, s.blocks, parts)
    store = make_store(s, (64, s.tile_columns), m, n, jnp.dtype(jnp.float32), Epilogue())
    call = _Call(
        store, s, weights, columns, walk, Ring.of(walk, steps * in_block, s.stages), steps, in_block, interpret
    )
    run = launch(
        "matmul_bf16x6",
        call.kernel,
        ((parts, *stack, m, n), jnp.float32),
        call.scratch(),
        blocks=walk.blocks,
        warpgroups=s.warpgroups + 1,
        interpret=interpret,
    )
    return run(x, w)


@dataclass(frozen=True)
class _Call:
    """What is fixed about a launch.

    Attributes:
        store: How a tile leaves.
        schedule: Tiles and stages.
        weights: wgmma's rows, float32 in shared memory.
        columns: wgmma's columns, the activations in three parts.
        walk: How blocks walk the tiles.
        ring: The stages.
        steps: Blocks of K in a shard.
        shards: Shards that a block adds.
        interpret: Whether the interpreter runs the kernel, which multiplies what is in shared memory only.
    """

    store: Store
    schedule: MatmulSchedule
    weights: Operand
    columns: Operand
    walk: Walk
    ring: Ring
    steps: int
    shards: int
    interpret: Any

    @property
    def alias(self) -> bool:
        """Whether the store needs its shared memory as plain rows too."""
        return self.store.ragged and not self.interpret

    def scratch(self) -> list[Any]:
        """Returns the shared memory and the barriers of a block."""
        s, stages = self.schedule, self.ring.stages
        split = plgpu.SMEM(
            (s.warpgroups, _PARTS, 64, BLOCK), jnp.bfloat16, transforms=tile_transforms(BLOCK, jnp.bfloat16)
        )
        return [
            self.weights.scratch(stages, jnp.float32, False),
            self.columns.scratch(stages, jnp.bfloat16, False),
            self.store.scratch(s.warpgroups, jnp.float32, self.alias),
            *([split] if self.interpret else []),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=stages),
        ]

    def kernel(self, x: Any, w: Any, out: Any, weights: Any, columns: Any, buffers: Any, *refs: Any) -> None:
        """The body of a block."""
        warpgroup, block = here()
        body = _Body(
            call=self,
            x=x,
            w=w,
            out=out,
            weights=weights,
            columns=columns,
            buffers=buffers if self.alias else (buffers, None),
            split=refs[0] if self.interpret else None,
            full=refs[-2],
            empty=refs[-1],
            warpgroup=warpgroup,
            block=block,
            count=self.walk.count(block),
        )
        pl.when(warpgroup == self.schedule.warpgroups)(body.produce)
        pl.when(warpgroup < self.schedule.warpgroups)(body.consume)


@dataclass(frozen=True)
class _Body:
    """A block: what is fixed, and its references.

    Attributes:
        call: What is fixed.
        x: The activations in memory.
        w: The weights in memory.
        out: The result.
        weights: Stages of the weights.
        columns: Stages of the activations.
        buffers: Those of the store, and the same as plain rows or None.
        split: Shared memory of split weights under the interpreter, or None.
        full: Barriers of the stages that have arrived.
        empty: Barriers of the stages that have been read.
        warpgroup: This warpgroup.
        block: This block.
        count: Tiles of this block.
    """

    call: _Call
    x: Any
    w: Any
    out: Any
    weights: Any
    columns: Any
    buffers: tuple[Any, Any]
    split: Any
    full: Any
    empty: Any
    warpgroup: Any
    block: Any
    count: Any

    def produce(self) -> None:
        """Copies both operands of all tiles of the block."""
        call = self.call
        if call.schedule.warpgroups > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def copy(place: Place, tile: Any, step: Any, slot: Any) -> None:
            del tile
            block, full = place.part * call.ring.steps + step, self.full.at[slot]
            w, x = in_stack(self.w, place.entry), in_stack(self.x, place.entry)
            call.weights.copy([w], self.weights, place.row, block * BLOCK, slot, full)
            call.columns.copy([x], self.columns, place.column, block * (_PARTS * BLOCK), slot, full)

        call.ring.produce(self.count, self.empty, lambda tile: call.walk.place(self.block, tile), copy)

    def consume(self) -> None:
        """Multiplies and stores this warpgroup's part of the tiles of the block."""
        call, warpgroups = self.call, self.call.schedule.warpgroups
        if warpgroups > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS[warpgroups], action="increase")
        tiled, plain = self.buffers

        @pl.loop(0, self.count)
        def _(tile: Any) -> None:
            place, start = call.walk.place(self.block, tile), tile * call.ring.steps

            def add_shard(shard: Any, total: Any) -> Any:
                begin = start + shard * call.steps
                return total + self.add_blocks(begin)

            total = (
                self.add_blocks(start) if call.shards == 1 else lax.fori_loop(0, call.shards, add_shard, self.zeros())
            )
            end = Ending(
                Epilogue(),
                call.store,
                True,
                self.out.at[place.part],
                tiled.at[self.warpgroup],
                None if plain is None else plain.at[self.warpgroup],
            )
            end.finish((total,), place.entry, place.row + self.warpgroup * 64, place.column)

        plgpu.wait_smem_to_gmem(0)

    def zeros(self) -> Any:
        """Returns the sum of nothing."""
        return plgpu.layout_cast(jnp.zeros((64, self.call.schedule.tile_columns), jnp.float32), plgpu.Layout.WGMMA)

    def add_blocks(self, start: Any) -> Any:
        """Adds the blocks of a shard, whose first one stands at `start` in the sequence of stages."""
        return lax.fori_loop(0, self.call.steps, lambda i, total: self.add_block(start + i, total), self.zeros())

    def add_block(self, position: Any, total: Any) -> Any:
        """Adds the six products of a block of K."""
        call = self.call
        slot = lax.rem(position, call.ring.stages)
        plgpu.barrier_wait(self.full.at[slot])
        part = pl.ds(self.warpgroup * 64, 64) if call.schedule.warpgroups > 1 else slice(None)
        weights = call.weights.read(self.weights, slot, 0, 0, 1, part)
        layout = plgpu.Layout.WGMMA if call.weights.k_major else plgpu.Layout.WGMMA_TRANSPOSED
        value = plgpu.layout_cast(plgpu.load(weights, layout=layout), plgpu.Layout.WGMMA)
        operands = split(value, _round)
        if self.split is not None:
            for i, operand in enumerate(operands):
                self.split.at[self.warpgroup, i][...] = operand
            plgpu.commit_smem()
            operands = [self.split.at[self.warpgroup, i] for i in range(_PARTS)]

        def multiply(accumulator: Any) -> Any:
            for i, j in _PRODUCTS:
                columns = call.columns.read(self.columns, slot, 0, j, _PARTS, slice(None))
                plgpu.wgmma(accumulator, operands[i], columns.transpose((1, 0)))
            return accumulator[...]

        block = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((64, call.schedule.tile_columns), jnp.float32))
        plgpu.barrier_arrive(self.empty.at[slot])
        return total + block


def _round(value: Any) -> tuple[Any, Any]:
    part = value.astype(jnp.bfloat16)
    return part.astype(jnp.float32), part
