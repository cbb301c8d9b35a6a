"""Drawing tokens on an NVIDIA GPU: scale, noise and the first of the largest in one pass over the logits."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.contract import GUMBEL, GumbelContract, honour
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.threefry import threefry
from pallas_kernels.parts.triton.arithmetic import LN2, fused, log2, product, quotient
from pallas_kernels.parts.triton.launch import launch
from pallas_kernels.schedule.triton.sampling import DRAW_TILE, DrawTile

NO_TOKEN: Final = -1
_LANES: Final = 128
_PAIR: Final = 2 * _LANES
_NOTHING: Final = np.float32(-np.inf)
_COLDEST: Final = np.float32(2.0**-64)
_DEGREE: Final = 7


@in_32_bits
def draw(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    contract: GumbelContract = GUMBEL,
    tile: DrawTile = DRAW_TILE,
    interpret: bool = False,
) -> jax.Array:
    """Draws a token from each row.

    Args:
        logits: (R, V) float32; -inf for tokens that are not to be drawn.
        temperature: (R,) float32, at least 0; at 0 the first of the largest logits is taken. Those below 2**-64 count
            as that.
        seeds: (R, 2) uint32.
        positions: (R,) uint32.
        contract: How noise is made and added.
        tile: Columns and warps of a block.
        interpret: Whether to run on a CPU.

    Returns:
        (R,) int32, the lower token first among equals; -1 for a row that holds a nan or only -inf.

    Raises:
        UnsupportedError: If the contract is another one.

    Guarantee: row-invariant.

    Example:
        >>> words = jnp.zeros((1, 2), jnp.uint32)
        >>> draw(jnp.array([[0.0, 2.0, 1.0]]), jnp.zeros(1), words, words[0, :1], interpret=True).tolist()
        [1]
    """
    honour("draw", contract, GUMBEL)
    rows, width = logits.shape
    if not rows:
        return jnp.zeros(0, jnp.int32)
    parts = -(-width // (tile.blocks * _PAIR))

    def kernel(*refs: Any) -> None:
        _kernel(*refs, width=width, parts=parts, tile=tile, interpret=interpret)

    shape = (rows * parts,)
    largest, first = launch(
        kernel,
        logits.reshape(-1),
        temperature,
        seeds.reshape(-1),
        positions,
        blocks=rows * parts,
        out=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)],
        warps=tile.warps,
        stages=1,
        interpret=interpret,
    )
    (tokens,) = launch(
        lambda *refs: _merge(*refs, parts=parts, width=width),
        largest,
        first,
        blocks=rows,
        out=[jax.ShapeDtypeStruct((rows,), jnp.int32)],
        warps=1,
        stages=1,
        interpret=interpret,
    )
    return tokens


def _kernel(
    logits: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    largest: Any,
    first: Any,
    *,
    width: int,
    parts: int,
    tile: DrawTile,
    interpret: bool,
) -> None:
    block = pl.program_id(0)
    row, part = block // parts, block % parts
    number = part * tile.blocks + lax.broadcasted_iota(jnp.int32, (tile.blocks, _LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (tile.blocks, _LANES), 1)
    columns = number * _PAIR + lane, number * _PAIR + (lane + _LANES)
    there = [c < width for c in columns]
    read = [
        plt.load(logits.at[row * width + jnp.where(t, c, 0)], mask=t, other=_NOTHING)
        for c, t in zip(columns, there, strict=True)
    ]

    def noisy(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = seeds[2 * row], seeds[2 * row + 1]
        counter = (number * _LANES + lane).astype(jnp.uint32)
        words = threefry(key, (jnp.broadcast_to(positions[row], counter.shape), counter))
        divisor = jnp.broadcast_to(jnp.maximum(temperature[row], _COLDEST), (1, 1))
        scale = quotient(jnp.ones_like(divisor), divisor, interpret)
        a, b = (
            _add_noise(product(x, scale, interpret), w, interpret) for x, w in zip((first, second), words, strict=True)
        )
        return a, b

    sums = lax.cond(temperature[row] > 0, noisy, lambda *logits: logits, *read)
    best = jnp.maximum(*sums)
    top = jnp.max(best)
    # A nan is equal to nothing, whether it is the largest or not.
    places = [jnp.where(s == top, c, jnp.where(s == s, width, NO_TOKEN)) for s, c in zip(sums, columns, strict=True)]
    largest[block] = top
    first[block] = jnp.min(jnp.minimum(*places))


def _add_noise(score: jax.Array, word: jax.Array, interpret: bool) -> jax.Array:
    """Subtracts the logarithm of an exponential variable; see `GumbelContract`."""
    # A power of two is an exact factor: nothing here is rounded but the conversion and the last difference.
    v = jnp.minimum((word.astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    series = jnp.full_like(v, np.float32(1 / _DEGREE))
    for power in range(_DEGREE - 1, 0, -1):
        series = fused(series, v, np.float32(1 / power), interpret)
    far = product(log2(np.float32(1) - v, interpret), -LN2, interpret)
    exponential = jnp.where(v < np.float32(1 / 8), product(series, v, interpret), far)
    return fused(log2(exponential, interpret), -LN2, score, interpret)


def _merge(largest: Any, first: Any, tokens: Any, *, parts: int, width: int) -> None:
    """Writes the token of a row whose parts have these largest sums at these places."""
    row = pl.program_id(0)
    part = lax.broadcasted_iota(jnp.int32, (1 << max(0, parts - 1).bit_length(),), 0)
    there, place = part < parts, row * parts + jnp.minimum(part, parts - 1)
    sums = plt.load(largest.at[place], mask=there, other=_NOTHING)
    places = plt.load(first.at[place], mask=there, other=width)
    top = jnp.max(sums)
    found = jnp.min(jnp.where(sums == top, places, width))
    known = (top > _NOTHING) & (jnp.min(places) != NO_TOKEN)
    tokens[row] = jnp.where(known, found, NO_TOKEN)
