"""Shared memory and barriers of the kernels of attention's gradients."""

from typing import Any, Final, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.hopper._gradient_steps import PARTS, STATS, TURNS, GradientCall
from pallas_kernels.attention.schedule.hopper import GradientSchedule
from pallas_kernels.parts.hopper.tile import ROWS, tiled

_WIDEST_SUMS: Final = 96  # columns that are handed on at once


class Scratch(NamedTuple):
    """Shared memory and barriers.

    Attributes:
        keys: (H / 64, 2, 64, 64), pieces of columns and rows.
        values: (2, 64, H).
        queries: (stages, rows, H).
        cotangents: (stages, rows, H).
        numbers: (stages * 3 + 128 / rows, rows) float32, of the queries of all stages and of the keys.
        slopes: (2, 2, rows / 64, 64, 64), of keys (rows) and queries (columns), twice.
        sums: (buffers * 2, 64, 64) float32, what is to be added to the gradient of queries.
        cache_full: Barrier of keys, values and marks.
        queries_full: Barriers of queries and stats.
        cotangents_full: Barriers of cotangents.
        sums_full: Barriers of the warps that add: their number in turn times 2, and the warpgroup that computes.
        cache_free: Barrier.
        stage_free: Barriers of queries, stats and cotangents.
        sums_free: Barriers of the same.
        together: Barrier of the warpgroups that compute.
        slopes_full: Barrier of the slopes of the previous step, which a lagging step multiplies.
        slopes_free: Barrier of those of the step before it.
    """

    keys: Any
    values: Any
    queries: Any
    cotangents: Any
    numbers: Any
    slopes: Any
    sums: Any
    cache_full: Any
    queries_full: Any
    cotangents_full: Any
    sums_full: Any
    cache_free: Any
    stage_free: Any
    sums_free: Any
    together: Any
    slopes_full: Any
    slopes_free: Any


class WideScratch(NamedTuple):
    """Shared memory and barriers; `Scratch` says what for.

    Attributes:
        keys: (2 * rounds, 64, columns of a round).
        values: (2, 64, V / 2).
        queries: (stages, 2, 64, H / 2).
        cotangents: (stages of cotangents, 2, 64, V / 2).
        numbers: (stages * 3 + 1, 64) float32.
        slopes: (2, 64, 64), of keys (rows) and queries (columns), for each warpgroup.
        sums: (buffers * 2, 64, columns of a round) float32.
        cache_full: Barrier of keys, values and marks.
        queries_full: Barriers of queries and stats.
        cotangents_full: Barriers of cotangents.
        sums_full: Barriers.
        cache_free: Barrier.
        queries_free: Barriers of queries and stats.
        cotangents_free: Barriers of cotangents.
        sums_free: Barriers.
        together: Barrier of the warpgroups that compute.
        alone: A barrier of each of them.
    """

    keys: Any
    values: Any
    queries: Any
    cotangents: Any
    numbers: Any
    slopes: Any
    sums: Any
    cache_full: Any
    queries_full: Any
    cotangents_full: Any
    sums_full: Any
    cache_free: Any
    queries_free: Any
    cotangents_free: Any
    sums_free: Any
    together: Any
    alone: Any


def scratch_types(call: GradientCall, schedule: GradientSchedule, dtype: Any) -> Scratch:
    """Returns the types of the memory and the barriers."""
    tiles, stages, size = call.tiles, schedule.stages, call.size
    rows = plgpu.SMEM((stages, tiles.rows, size), dtype, transforms=tiled(dtype))
    return Scratch(
        keys=plgpu.SMEM((call.columns, PARTS, ROWS, ROWS), dtype, transforms=tiled(dtype)),
        values=plgpu.SMEM((PARTS, ROWS, size), dtype, transforms=tiled(dtype)),
        queries=rows,
        cotangents=rows,
        numbers=plgpu.SMEM((stages * STATS + tiles.block // tiles.rows, tiles.rows), jnp.float32),
        slopes=plgpu.SMEM((2, PARTS, call.rows, ROWS, ROWS), dtype, transforms=tiled(dtype)),
        sums=plgpu.SMEM((schedule.buffers * PARTS, ROWS, ROWS), jnp.float32, transforms=tiled(jnp.float32)),
        cache_full=plgpu.Barrier(num_arrivals=PARTS * (call.columns + 2)),
        queries_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        cotangents_full=plgpu.Barrier(num_barriers=stages),
        sums_full=plgpu.Barrier(num_barriers=TURNS * PARTS),
        cache_free=plgpu.Barrier(num_arrivals=PARTS),
        stage_free=plgpu.Barrier(num_arrivals=PARTS, num_barriers=stages),
        sums_free=plgpu.Barrier(num_barriers=TURNS * PARTS),
        together=plgpu.Barrier(num_arrivals=PARTS),
        slopes_full=plgpu.Barrier(num_arrivals=PARTS),
        slopes_free=plgpu.Barrier(num_arrivals=PARTS),
    )


def rounds_of(call: GradientCall) -> int:
    """Returns in how many pieces a warpgroup hands on what it gives to a tile's queries."""
    return -(-call.size // PARTS // _WIDEST_SUMS)


def wide_scratch_types(call: GradientCall, schedule: GradientSchedule, dtype: Any) -> WideScratch:
    """Returns the types of the memory and the barriers."""
    stages, few, rounds = schedule.stages, schedule.cotangent_stages, rounds_of(call)
    half, value_half = call.size // PARTS, call.value_size // PARTS
    width = half // rounds
    return WideScratch(
        keys=plgpu.SMEM((PARTS * rounds, ROWS, width), dtype, transforms=tiled(dtype, width)),
        values=plgpu.SMEM((PARTS, ROWS, value_half), dtype, transforms=tiled(dtype, value_half)),
        queries=plgpu.SMEM((stages, PARTS, ROWS, half), dtype, transforms=tiled(dtype, half)),
        cotangents=plgpu.SMEM((few, PARTS, ROWS, value_half), dtype, transforms=tiled(dtype, value_half)),
        numbers=plgpu.SMEM((stages * STATS + 1, ROWS), jnp.float32),
        slopes=plgpu.SMEM((PARTS, ROWS, ROWS), dtype, transforms=tiled(dtype)),
        sums=plgpu.SMEM((schedule.buffers * PARTS, ROWS, width), jnp.float32, transforms=tiled(jnp.float32)),
        cache_full=plgpu.Barrier(num_arrivals=PARTS * (rounds + 1) + 1),
        queries_full=plgpu.Barrier(num_arrivals=PARTS + 1, num_barriers=stages),
        cotangents_full=plgpu.Barrier(num_arrivals=PARTS, num_barriers=few),
        sums_full=plgpu.Barrier(num_barriers=TURNS * PARTS),
        cache_free=plgpu.Barrier(num_arrivals=PARTS),
        queries_free=plgpu.Barrier(num_arrivals=PARTS, num_barriers=stages),
        cotangents_free=plgpu.Barrier(num_arrivals=PARTS, num_barriers=few),
        sums_free=plgpu.Barrier(num_barriers=TURNS * PARTS),
        together=plgpu.Barrier(num_arrivals=PARTS),
        alone=plgpu.Barrier(num_barriers=PARTS),
    )
