"""The pieces of a tile of one block of keys whose bits may depend on its shape, compared alone.

These are its two products, which XLA gives to a library, and the exponentials of the scores. A tile has the reference's
bits if its pieces have them:

- What is compiled here is what the program has: the same functions on operands of the same shapes, between barriers
  that no fusion crosses, by the same compiler for the same processor.
- Everything else in such a tile is one of three: a choice, a copy, or a comparison, which is exact; a sum, product,
  quotient or largest number, which IEEE 754 rounds correctly whatever the vectors, as long as no product and sum are
  contracted, which barriers prevent; or a function of whole vectors of a fixed length (`run_flat`). Norms and softmax
  consist of the same operations and are compared with nothing. None of it depends on the processor.
- There is no loop inside. XLA:CPU may compile a small loop as one function, across barriers, so a tile with a loop over
  blocks of keys is compared as a whole (`pallas_kernels.attention.cpu.launch`).

A whole tile would be compiled to be compared alone, which takes longer than comparing all products of a model. The
tests compare whole tiles.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.blockwise.forward import softmax_weights, tile_rows
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.programs import WITH_KEYS, WITH_VALUES, dot
from pallas_kernels.attention.schedule.cpu import REFERENCE, Tile
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options

_SEQUENCES: Final = 2
_QUERIES: Final = 3

_FEWEST_COMPARED: Final = 256
"""Elements of a row's values to compare: a short sum in another order agrees in three of four."""


class Operands[T](NamedTuple):
    """Operands of the pieces, for b sequences, R rows and n keys.

    Attributes:
        query: (b, K, R, H) float32.
        scores: (b, K, R, n) float32.
        shift: (b, K, R) float32, at least the row's largest score.
        weights: (b, K, R, n) float32, zero where a row does not see the key.
        seen: (b, 1, R, n) bool, whether a row sees a key.
        keys: (b, n, K, H) float32.
        values: (b, n, K, V) float32.
    """

    query: T
    scores: T
    shift: T
    weights: T
    seen: T
    keys: T
    values: T


def pieces_agree(tile: Tile, shape: ProgramShape) -> bool:
    """Returns whether the pieces of a tile have the reference's bits on this machine, in every sequence and row.

    Args:
        tile: Of one block of keys.
        shape: The rest of the program's shape.
    """
    rows, alone = tile_rows(tile.queries, shape.group), tile_rows(1, shape.group)
    compiled = _compile(shape, tile, rows)
    reference = _compile(shape, REFERENCE, alone)
    sequences, kinds = np.arange(tile.sequences) % _SEQUENCES, np.arange(rows) % (_QUERIES * shape.group)
    for trial in range(-(-_FEWEST_COMPARED // (shape.heads * shape.value_size))):
        probe = _probe(shape, tile.keys, trial)
        expected = _expected(probe, shape.group, alone, reference)
        for found, wanted in zip(compiled(*_taken(probe, sequences, kinds)), expected, strict=True):
            same = found.view(np.uint32) == wanted[sequences][:, :, kinds, : found.shape[3]].view(np.uint32)
            if not same.all():
                return False
    return True


def _expected(
    probe: Operands[np.ndarray], group: int, rows: int, reference: Callable[..., list[np.ndarray]]
) -> list[np.ndarray]:
    """Returns what the pieces give for each query alone, with as many keys as the reference takes."""
    probe = _with_keys(probe, REFERENCE.keys)
    by_sequence = []
    for sequence in range(_SEQUENCES):
        at = np.arange(sequence, sequence + 1)
        queries = [(q * group + np.arange(rows)) % (_QUERIES * group) for q in range(_QUERIES)]
        found = [reference(*_taken(probe, at, kinds)) for kinds in queries]
        by_sequence.append([np.concatenate([x[:, :, :group] for x in piece], 2) for piece in zip(*found, strict=True)])
    return [np.concatenate(piece) for piece in zip(*by_sequence, strict=True)]


def _pieces(*operands: jax.Array, crossed: bool) -> tuple[jax.Array, ...]:
    """Returns the products with keys (b, K, R, n), the softmax weights (b, K, R, n) and the values (b, K, R, V)."""
    given: Operands[jax.Array] = Operands(*isolate(*operands))
    return isolate(
        dot(given.query, given.keys, WITH_KEYS, fused=True, crossed=crossed),
        softmax_weights(given.scores, given.shift, given.seen),
        dot(given.weights, given.values, WITH_VALUES, fused=True, crossed=crossed),
    )


@cached_for_options(maxsize=64)
def _compile(shape: ProgramShape, tile: Tile, rows: int) -> Callable[..., list[np.ndarray]]:
    heads, size, value_size = shape.heads, shape.size, shape.value_size
    sequences, keys = tile.sequences, tile.keys
    by_row = (sequences, heads, rows)
    floats = ((*by_row, size), (*by_row, keys), by_row, (*by_row, keys))
    operands = [
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in floats),
        jax.ShapeDtypeStruct((sequences, 1, rows, keys), jnp.bool_),
        *(jax.ShapeDtypeStruct((sequences, keys, heads, n), jnp.float32) for n in (size, value_size)),
    ]
    compiled = ahead_of_time(functools.partial(_pieces, crossed=tile.crossed), *operands)
    # The program replaces -0 by +0 in what it makes of the values.
    return lambda *arrays: [np.asarray(x) + np.float32(0) for x in compiled(*arrays)]


def _probe(shape: ProgramShape, keys: int, trial: int) -> Operands[np.ndarray]:
    """Returns the operands of `_SEQUENCES` sequences with `_QUERIES` queries each, which see some keys or none."""
    rng = np.random.default_rng([*shape, keys, trial])
    rows = (_SEQUENCES, shape.heads, _QUERIES * shape.group)
    kind = np.arange(rows[2]) // shape.group
    query = rng.standard_normal((*rows, shape.size))
    query[:, :, kind == 1] *= 2.0 ** rng.integers(-20, 3, query[:, :, kind == 1].shape)
    query[:, :, kind == 2] = np.linspace(-3, 3, shape.size)
    of_keys = rng.standard_normal((_SEQUENCES, keys, shape.heads, shape.size))
    values = rng.standard_normal((_SEQUENCES, keys, shape.heads, shape.value_size))
    values[1] *= 2.0 ** rng.integers(-60, 60, values[1].shape)
    first = np.array([[0, 0, 0], [0, keys // 3, keys // 2]])[:, kind]
    last = np.array([[keys, keys // 2, 0], [keys, keys - 1, keys]])[:, kind]
    position = np.arange(keys)
    seen = ((position >= first[..., None]) & (position < last[..., None]))[:, None]
    scores = np.where(seen, 9 * rng.standard_normal((*rows, keys)), -np.inf)
    shift = np.where((last > first)[:, None], scores.max(3), 0)
    weights = np.where(seen, np.exp2(rng.uniform(-24, 0, (*rows, keys))), 0)
    return Operands(
        query=query.astype(np.float32),
        scores=scores.astype(np.float32),
        shift=shift.astype(np.float32),
        weights=weights.astype(np.float32),
        seen=seen,
        keys=of_keys.astype(np.float32),
        values=values.astype(np.float32),
    )


def _taken(probe: Operands[np.ndarray], sequences: np.ndarray, rows: np.ndarray) -> Operands[np.ndarray]:
    """Returns the operands of some sequences and some of their rows."""
    own = Operands(*(x[sequences] for x in probe))
    by_row = {name: getattr(own, name)[:, :, rows] for name in ("query", "scores", "shift", "weights", "seen")}
    return own._replace(**by_row)


def _with_keys(probe: Operands[np.ndarray], keys: int) -> Operands[np.ndarray]:
    """Returns the operands with further keys, which no row sees."""
    more = keys - probe.keys.shape[1]
    rest = [(0, 0), (0, 0), (0, 0), (0, more)]
    return probe._replace(
        scores=np.pad(probe.scores, rest, constant_values=-np.inf),
        weights=np.pad(probe.weights, rest),
        seen=np.pad(probe.seen, rest),
        keys=np.pad(probe.keys, [rest[0], rest[3], *rest[:2]]),
        values=np.pad(probe.values, [rest[0], rest[3], *rest[:2]]),
    )
