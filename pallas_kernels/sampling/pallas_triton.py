"""Draws tokens on an NVIDIA GPU: scale, noise and first maximum in one pass over the logits."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.contract import GUMBEL, GumbelContract, honour
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.arithmetic import LN2, fused, halves, larger, log2, product, quotient
from pallas_kernels.parts.pallas_triton.launch import launch
from pallas_kernels.parts.philox import philox
from pallas_kernels.sampling.schedule.pallas_triton import STEP_COLUMNS, DrawTile, draw_tile

NO_TOKEN: Final = -1
_LANES: Final = 128
_WORDS: Final = 4
_NOTHING: Final = np.float32(-np.inf)
_EVERYTHING: Final = np.float32(np.inf)
_COLDEST: Final = np.float32(2.0**-64)
_DEGREE: Final = 7
_ONE_OF: Final = np.float32(2**-32)
_LESS: Final = np.float32(1 - 2**-9)

type Columns = list[jax.Array]
"""Values of 128 * 4 columns: columns 0 to 127, 128 to 255, ..."""

type Found = tuple[jax.Array, jax.Array]
"""The largest score and its first index, or NO_TOKEN if a score is nan."""

type Way = Callable[[jax.Array, Columns], tuple[Callable[[], Columns], Callable[[], Columns]]]
"""Maps the index of a step and its logits to functions that compute upper bounds of the scores, and the scores."""


@in_32_bits
def draw(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    contract: GumbelContract = GUMBEL,
    tile: DrawTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Draws a token from each row.

    Args:
        logits: (R, V) float32; -inf for tokens that must not be drawn.
        temperature: (R,) float32, at least 0; at 0 (or below 2**-64) the first maximum of the logits is drawn.
        seeds: (R, 2) uint32.
        positions: (R,) uint32.
        contract: How noise is generated and added.
        tile: Columns and warps of a block; chosen from the shape by default.
        interpret: Whether to run on a CPU.

    Returns:
        (R,) int32, the lowest token among equals; -1 for a row that contains nan or only -inf.

    Raises:
        UnsupportedError: If the contract is not supported.

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
    tile = tile or draw_tile(rows, width)
    parts = -(-width // (tile.steps * STEP_COLUMNS))

    def kernel(*refs: Any) -> None:
        _kernel(*refs, width=width, parts=parts, steps=tile.steps, interpret=interpret)

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
    steps: int,
    interpret: bool,
) -> None:
    """Writes the largest score of a part of a row, and its first index."""
    block = pl.program_id(0)
    row, part = block // parts, block % parts
    begin, end = part * steps, jnp.minimum((part + 1) * steps, -(-width // STEP_COLUMNS))

    def load(step: jax.Array) -> Columns:
        inside = step < end
        return [plt.load(logits.at[row * width + c], mask=(c < width) & inside, other=_NOTHING) for c in _columns(step)]

    def noisy(*read: jax.Array) -> Found:
        way = _noisy(temperature[row], (seeds[2 * row], seeds[2 * row + 1]), positions[row], interpret)
        return _search(begin, end, list(read), load, way, width, interpret)

    def greedy(*read: jax.Array) -> Found:
        return _search(begin, end, list(read), load, _greedy, width, interpret)

    # The first load is issued before any other memory access.
    largest[block], first[block] = lax.cond(temperature[row] > 0, noisy, greedy, *load(begin))


def _columns(step: jax.Array) -> Columns:
    lane = lax.broadcasted_iota(jnp.int32, (_LANES,), 0)
    return [step * STEP_COLUMNS + (word * _LANES + lane) for word in range(_WORDS)]


def _search(
    begin: jax.Array,
    end: jax.Array,
    read: Columns,
    load: Callable[[jax.Array], Columns],
    way: Way,
    width: int,
    interpret: bool,
) -> Found:
    """Searches the steps from `begin` to `end`; the logits of the first step are already loaded.

    After the first step, scores are computed only in steps in which one may exceed the maximum so far: later columns
    lose ties. The logits of a step are loaded while the previous step is computed.
    """

    def step(index: jax.Array, carry: tuple[Columns, Found]) -> tuple[Columns, Found]:
        read, found = carry
        following = load(index + 1)
        bounds_of, sums_of = way(index, read)

        def may_be_above(best: jax.Array) -> jax.Array:
            bound = functools.reduce(lambda a, b: larger(a, b, interpret), bounds_of())
            # Not for nan. A warp computes an integer maximum in one instruction, a float maximum in ten.
            return jnp.max(jnp.where((bound <= best) & (bound < _EVERYTHING), jnp.int32(0), jnp.int32(1)))

        def look(best: jax.Array, place: jax.Array) -> Found:
            sums, columns = sums_of(), _columns(index)
            top = jnp.max(functools.reduce(jnp.maximum, sums))
            places = [
                jnp.where(s == top, c, jnp.where(s == s, width, NO_TOKEN)) for s, c in zip(sums, columns, strict=True)
            ]
            first = jnp.min(functools.reduce(jnp.minimum, places))
            nan = jnp.minimum(first, place) == NO_TOKEN
            return jnp.maximum(best, top), jnp.where(nan, NO_TOKEN, jnp.where(top > best, first, place))

        looked_at = lax.cond(
            found[0] == _NOTHING, lambda best: (best == _NOTHING).astype(jnp.int32), may_be_above, found[0]
        )
        return following, lax.cond(looked_at > 0, look, lambda *found: found, *found)

    nothing = jnp.full((), _NOTHING), jnp.full((), width, jnp.int32)
    last: tuple[Columns, Found] = lax.fori_loop(begin, end, step, (read, nothing))
    return last[1]


def _greedy(_: jax.Array, read: Columns) -> tuple[Callable[[], Columns], Callable[[], Columns]]:
    return lambda: read, lambda: read


def _noisy(temperature: jax.Array, seed: tuple[jax.Array, jax.Array], position: jax.Array, interpret: bool) -> Way:
    divisor = jnp.broadcast_to(jnp.maximum(temperature, _COLDEST), (1,))
    scale = quotient(jnp.ones_like(divisor), divisor, interpret)

    def way(step: jax.Array, read: Columns) -> tuple[Callable[[], Columns], Callable[[], Columns]]:
        counter = (step * _LANES + lax.broadcasted_iota(jnp.int32, (_LANES,), 0)).astype(jnp.uint32)
        nothing = jnp.zeros_like(counter)
        words = philox(seed, (counter, jnp.full_like(counter, position), nothing, nothing), halves(interpret))
        numbers = [word.astype(jnp.float32) for word in words]
        scores = [product(x, scale, interpret) for x in read]

        def each(fn: Callable[[jax.Array, jax.Array, bool], jax.Array]) -> Columns:
            return [fn(score, number, interpret) for score, number in zip(scores, numbers, strict=True)]

        return lambda: each(_bound), lambda: each(_add_noise)

    return way


def _bound(score: jax.Array, number: jax.Array, interpret: bool) -> jax.Array:
    """Returns a cheap upper bound of `_add_noise`: an exponential variable is at least its uniform variable.

    The uniform variable is reduced by more than the total error of the logarithms. The last instruction is the same,
    and its rounding is monotonic.
    """
    less = fused(number, _ONE_OF * _LESS, _ONE_OF * _LESS / 2, interpret)
    return fused(log2(less, interpret), -LN2, score, interpret)


def _add_noise(score: jax.Array, number: jax.Array, interpret: bool) -> jax.Array:
    """Subtracts the logarithm of an exponential variable; see `GumbelContract`."""
    # Multiplying by a power of two is exact: only the conversion and the last difference are rounded.
    v = jnp.minimum((number + np.float32(0.5)) * _ONE_OF, np.float32(1 - 2**-24))
    series = jnp.full_like(v, np.float32(1 / _DEGREE))
    for power in range(_DEGREE - 1, 0, -1):
        series = fused(series, v, np.float32(1 / power), interpret)
    far = product(log2(np.float32(1) - v, interpret), -LN2, interpret)
    exponential = jnp.where(v < np.float32(1 / 8), product(series, v, interpret), far)
    return fused(log2(exponential, interpret), -LN2, score, interpret)


def _merge(largest: Any, first: Any, tokens: Any, *, parts: int, width: int) -> None:
    """Writes the token of a row, given the largest scores of its parts and their indices."""
    row = pl.program_id(0)
    part = lax.broadcasted_iota(jnp.int32, (1 << max(0, parts - 1).bit_length(),), 0)
    there, place = part < parts, row * parts + jnp.minimum(part, parts - 1)
    sums = plt.load(largest.at[place], mask=there, other=_NOTHING)
    places = plt.load(first.at[place], mask=there, other=width)
    top = jnp.max(sums)
    found = jnp.min(jnp.where(sums == top, places, width))
    known = (top > _NOTHING) & (jnp.min(places) != NO_TOKEN)
    tokens[row] = jnp.where(known, found, NO_TOKEN)
