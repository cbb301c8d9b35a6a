"""Attention on the CPU: tiles of several shapes that give the bits of one reference tile.

The number of sequences and queries of a tile changes XLA's dot and its vector loops, which mostly keep the order of
the sums and sometimes do not. So a tile is used only after its program gave the reference's bits on this machine. The
reference runs one operation at a time, for which only its products and functions are compiled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.attention.blockwise import backward, tiling
from pallas_kernels.attention.blockwise.forward import attend
from pallas_kernels.attention.blockwise.keys import Cache, contiguous_blocks
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.call import AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.cpu.pieces import pieces_agree
from pallas_kernels.attention.mask_bounds import MaskBounds
from pallas_kernels.attention.schedule.cpu import GRADIENT_REFERENCE, REFERENCE, Tile, attention_tiles, gradient_tiles
from pallas_kernels.contract import XLA_FUNCTIONS, AttentionContract, ElementwiseContract, attention_contract
from pallas_kernels.contract.honour import honour
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options
from pallas_kernels.runtime.disk_cache import remembered
from pallas_kernels.runtime.one_by_one import one_by_one

_SCALE = 0.125

Program = Callable[..., tuple[jax.Array, ...]]


def attention(
    call: AttentionCall, *, contract: AttentionContract, functions: ElementwiseContract = XLA_FUNCTIONS
) -> tuple[jax.Array, ...]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        call: The call.
        contract: Order of the sums.
        functions: How exp, log and tanh are computed.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If a contract is another one.

    Guarantee: row-invariant.

    Example:
        >>> from jax import numpy as jnp
        >>> q, k, limits = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.array([[0, 1, 3]])
        >>> call = AttentionCall(q, k, k, limits, AttentionOptions(scale=1.0))
        >>> attention(call, contract=attention_contract())[0].tolist()
        [[[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]]
    """
    honour("attention", functions, XLA_FUNCTIONS)
    honour("attention", contract, attention_contract())
    return tiling.run(call, contract=contract, choose=_verified)


def gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: AttentionContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> backward.Gradients:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        call: The call, without pages and without 8-bit keys.
        results: The results of the forward pass, and the gradient of the outputs.
        contract: Order of the sums, as in the forward pass.
        functions: As for `attention`.

    Returns:
        The gradients of queries, keys and values, with their shapes and dtypes.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    honour("attention_gradients", functions, XLA_FUNCTIONS)
    honour("attention_gradients", contract, attention_contract())
    query, key, value = call.query, call.key, call.values
    heads, capped = key.shape[2], call.options.soft_cap is not None
    shape = ProgramShape(heads, query.shape[2] // max(1, heads), key.shape[3], value.shape[3], capped)
    empty = 0 in key.shape or not value.shape[3]
    tile = next(t for t in gradient_tiles(query.shape[1], key.shape[1]) if empty or honours_gradients(t, shape))
    return backward.gradients(call, results, contract=contract, tile=tile)


def score_gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: AttentionContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Computes the gradients of the bias of the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Guarantee: row-invariant; a row is a query.
    """
    honour("attention_score_gradients", functions, XLA_FUNCTIONS)
    honour("attention_score_gradients", contract, attention_contract())
    return backward.score_gradients(call, results, contract=contract, tile=GRADIENT_REFERENCE)


def _verified(batch: int, queries: int, capacity: int, shape: ProgramShape) -> Tile:
    """Returns the first tile of the schedule that honours the contract."""
    tiles = attention_tiles(batch, queries, capacity, heads=shape.heads, size=shape.size)
    return next(t for t in tiles if honours_contract(t, shape))


@cached_for_options()
@remembered
def honours_contract(tile: Tile, shape: ProgramShape) -> bool:
    """Returns whether a tile gives the reference's bits on this machine, at every position in it.

    The comparison runs once per process and shape, on normal and on widely spread values, over two blocks of keys that
    some rows see in full, some in part and some not at all. All are finite, so the branch for other values, which would
    not run, is not compiled. Of a tile of one block the pieces are compared (`pieces_agree`). The result depends on
    the machine and the jaxlib version, never on time or on the batch.

    Args:
        tile: The tile to try.
        shape: The rest of the program's shape.
    """
    if tile == REFERENCE:
        return _is_as_written(shape)
    if tile.one_block:
        return pieces_agree(tile, shape)
    sequences, queries = np.arange(tile.sequences) % _SEQUENCES, np.arange(tile.queries) % _QUERIES
    at = np.ix_(sequences, queries)
    keys = tile.keys if tile.keys < REFERENCE.keys else 2 * REFERENCE.keys
    query, key, value, first, last = _probe(shape, keys)
    given = query[at], key[sequences], value[sequences], first[at], last[at]
    actual = _compile_and_run(_probe_program(tile, shape.capped), *given)
    return _same_bits(actual, [e[at] for e in _reference_of_probe(shape, keys)])


def _is_as_written(shape: ProgramShape) -> bool:
    """Returns True if the compiled reference gives the bits of its operations one after another.

    It takes the place of tiles that all differ, and is compared only then: compiling it takes longer than the model.

    Raises:
        UnsupportedError: If it gives other bits.
    """
    keys = 2 * REFERENCE.keys
    compiled = _compile_and_run(_probe_program(REFERENCE, shape.capped), *_probe(shape, keys))
    return not _refused(REFERENCE, shape, compiled, _reference_of_probe(shape, keys))


# Different sequences and queries of the probe; a tile repeats them.
_SEQUENCES = 2
_QUERIES = 3


def _probe(shape: ProgramShape, keys: int) -> tuple[np.ndarray, ...]:
    """Returns queries, keys, values and what is seen of them."""
    rng = np.random.default_rng([*shape, keys])
    query = rng.standard_normal((_SEQUENCES, _QUERIES, shape.heads * shape.group, shape.size))
    query[:, 1] *= 2.0 ** rng.integers(-20, 3, query[:, 1].shape)
    query[:, 2] = np.linspace(-3, 3, shape.size)
    key, value = (rng.standard_normal((_SEQUENCES, keys, shape.heads, n)) for n in (shape.size, shape.value_size))
    value[1] *= 2.0 ** rng.integers(-60, 60, value[1].shape)
    first = np.array([[0, 0, 0], [0, 3, keys // 2 + 9]])
    last = np.array([[keys, keys // 2, 0], [keys // 2 - 1, keys - 28, keys]])
    return (*(a.astype(np.float32) for a in (query, key, value)), first.astype(np.int32), last.astype(np.int32))


@cached_for_options()
def _reference_of_probe(shape: ProgramShape, keys: int) -> tuple[np.ndarray, ...]:
    return one_by_one(_probe_program(REFERENCE, shape.capped), *_probe(shape, keys))


def _probe_program(tile: Tile, capped: bool) -> Program:
    tile = tile._replace(finite=True)

    def program(
        query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys, values = (contiguous_blocks(Cache(x, x.dtype), tile, REFERENCE.keys) for x in (key, value))
        what, heads, size = MaskBounds(first, last), key.shape[2], value.shape[3]
        fixed: dict[str, Any] = {"contract": attention_contract(), "options": _probe_options(capped)}
        return attend(query, keys, values, what, heads=heads, value_size=size, tile=tile, **fixed)

    return program


@cached_for_options()
@remembered
def honours_gradients(tile: Tile, shape: ProgramShape) -> bool:
    """Returns whether a tile of the backward pass gives the reference's bits on this machine.

    Args:
        tile: The tile to try.
        shape: The rest of the program's shape.
    """
    if tile == GRADIENT_REFERENCE:
        return True
    rng = np.random.default_rng([*shape])
    keys, length = REFERENCE.keys + (0 if tile.one_block else 40), 2 * tile.queries
    sizes, rows = (shape.size, shape.value_size), (1, length, shape.heads * shape.group)
    query, out, cotangent = (rng.standard_normal((*rows, sizes[i])) for i in (0, 1, 1))
    cotangent *= 2.0 ** rng.integers(-30, 30, cotangent.shape)
    key, value = (rng.standard_normal((1, keys, shape.heads, n)) for n in sizes)
    lse = np.full(query.shape[:3], 3 + np.log(keys))
    floats = [x.astype(np.float32) for x in (query, key, value, out, lse, cotangent)]
    given = *floats, np.array([[keys - length + 5, length - 7, keys]], np.int32)
    program, reference = (gradient_program(t, shape.capped) for t in (tile, GRADIENT_REFERENCE))
    expected = one_by_one(reference, *given)
    if _same_bits(_compile_and_run(program, *given), expected):
        return True
    return _refused(tile, shape, _compile_and_run(reference, *given), expected)


@functools.cache
def gradient_program(tile: Tile, capped: bool) -> Program:
    """Returns the backward pass that tiles are compared by: of a call's arrays, its results' and its limits."""
    tile = tile._replace(finite=True)

    def program(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, out, lse, cotangent, limits = arrays
        call = AttentionCall(query, key, value, limits, _probe_options(capped))
        results = AttentionResults(out, lse, cotangent)
        return backward.gradients(call, results, contract=attention_contract(), tile=tile)

    return program


def _same_bits(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return all((a.view(np.uint32) == e.view(np.uint32)).all() for a, e in zip(actual, expected, strict=True))


def _refused(tile: Tile, shape: ProgramShape, compiled: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    """Returns False, if it is the tile that differs and not the reference, which would take the tile's place."""
    if not _same_bits(compiled, expected):
        raise UnsupportedError(
            f"attention on a CPU: expected from the compiled reference of {shape} the bits of its operations one after"
            f" the other, got others, as from {tile}: this XLA joins operations across barriers."
        )
    return False


def _probe_options(capped: bool) -> AttentionOptions:
    return AttentionOptions(_SCALE, causal=True, soft_cap=2.0 if capped else None)


def _compile_and_run(program: Program, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x) for x in ahead_of_time(program, *arrays)(*arrays))
