"""The maximum of a row and the sum of its exponentials, lane by lane, in the order of `OnlineRowContract`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import OnlineRowContract
from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, exponential, fused, product, strided
from pallas_kernels.parts.hopper.team import Team, combine_team
from pallas_kernels.parts.hopper.tree import combine_lanes

Lanes = tuple[jax.Array, jax.Array]
"""Each lane's maximum and sum."""

Load = Callable[[Any, int], jax.Array]

_CHUNK_BLOCKS: Final = OnlineRowContract.chunk


def load_columns(window: Any, width: int) -> jax.Array:
    """Reads columns as float32."""
    return plgpu.load(window, layout=strided(width)).astype(jnp.float32)


def _chunk(lanes: Lanes | None, blocks: Sequence[jax.Array], interpret: Any) -> Lanes:
    """Returns the statistics of each lane after another chunk."""
    if lanes is None and len(blocks) == 1:
        # The exponential of x - x, or of a number that is not finite.
        x = blocks[0]
        return x, jnp.where(jnp.abs(x) < jnp.inf, 1.0, jnp.where(x < 0, 0.0, x))
    largest = functools.reduce(jnp.maximum, blocks if lanes is None else [lanes[0], *blocks])
    shift = _finite(largest)
    added = functools.reduce(jnp.add, [exponential(block - shift, interpret) for block in blocks])
    if lanes is None:
        return largest, added
    return largest, fused(lanes[1], exponential(lanes[0] - shift, interpret), added, interpret)


def of_blocks(blocks: Sequence[jax.Array], interpret: Any) -> Lanes:
    """Returns the statistics of each lane in a segment held in registers."""
    lanes = _chunk(None, blocks[:_CHUNK_BLOCKS], interpret)
    for start in range(_CHUNK_BLOCKS, len(blocks), _CHUNK_BLOCKS):
        lanes = _chunk(lanes, blocks[start : start + _CHUNK_BLOCKS], interpret)
    return lanes


def of_columns(load: Load, columns: int, interpret: Any) -> Lanes:
    """Returns the statistics of each lane in a segment in shared memory."""

    def chunk(lanes: Lanes | None, offset: Any, width: int) -> Lanes:
        blocks = [load(offset + start, WARPGROUP) for start in range(0, width, WARPGROUP)]
        if width % WARPGROUP:
            lane = lax.iota(jnp.int32, WARPGROUP)
            lane = lane if interpret else plgpu.layout_cast(lane, strided(WARPGROUP))
            blocks[-1] = jnp.where(lane < width % WARPGROUP, blocks[-1], -jnp.inf)
        return _chunk(lanes, blocks, interpret)

    width = _CHUNK_BLOCKS * WARPGROUP
    whole, rest = divmod(columns, width)
    if not whole:
        return chunk(None, 0, rest)
    lanes = chunk(None, 0, width)
    if whole > 1:
        lanes = lax.fori_loop(1, whole, lambda i, lanes: chunk(lanes, i * width, width), lanes)
    return chunk(lanes, whole * width, rest) if rest else lanes


def merge(segments: Sequence[tuple[Any, Any]], interpret: Any) -> Lanes:
    """Returns the statistics of each lane in all segments; each segment is a pair of references."""
    maxima = [load_columns(maximum, WARPGROUP) for maximum, _ in segments]
    sums = [load_columns(total, WARPGROUP) for _, total in segments]
    largest = functools.reduce(jnp.maximum, maxima)
    shift = _finite(largest)
    weights = [exponential(maximum - shift, interpret) for maximum in maxima]
    total = product(sums[0], weights[0], interpret)
    for added, weight in zip(sums[1:], weights[1:], strict=True):
        total = fused(added, weight, total, interpret)
    return largest, total


def combine(lanes: Lanes, scratch: Any, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum and the sum of all lanes."""
    largest = combine_lanes(lanes[0], scratch.at[0], "max", interpret)
    weight = exponential(lanes[0] - _finite(largest), interpret)
    return largest, combine_lanes(product(lanes[1], weight, interpret), scratch.at[1], "add", interpret)


def combine_in_warp(strips: Sequence[Lanes], scratch: Any, interpret: Any, threads: int) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum and the sum of all lanes, of which a warp or some threads of one hold strips.

    Under the interpreter there is one strip, and this is `combine`.
    """
    if interpret:
        return combine(strips[0], scratch, interpret)
    team = Team(WARPGROUP, 1, scratch, None, interpret, threads)
    maxima = [maximum for maximum, _ in strips]
    if sum(x.shape[0] for x in maxima) * threads < WARPGROUP * WARPGROUP:
        # The step with lanes that the row does not have: nan becomes -inf.
        maxima = [jnp.where(x > -jnp.inf, x, -jnp.inf) for x in maxima]
    (largest,) = combine_team(["max"], [maxima], 0, team, [0])
    shift = _finite(largest)
    sums = [product(total, exponential(x - shift, interpret), interpret) for x, total in strips]
    (total,) = combine_team(["add"], [sums], 0, team, [1])
    return largest, total


def _finite(maximum: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(maximum) < jnp.inf, maximum, 0.0)
