"""Attention on the CPU: tiles of several shapes that give the bits of one reference tile.

The number of sequences and queries of a tile changes XLA's dot and its vector loops, which mostly keep the order of
the sums and sometimes do not. So a tile is used only after its program gave the reference's bits on this machine. The
reference runs one operation at a time, for which only its products and functions are compiled.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pallas_kernels.contract import attention_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.cpu import _backward, _tiling
from pallas_kernels.ops.attention.cpu._forward import attend
from pallas_kernels.ops.attention.cpu._keys import Cache, contiguous_blocks
from pallas_kernels.ops.attention.cpu._score_arrays import ScoreArrays
from pallas_kernels.ops.attention.cpu._spec import AttentionSpec
from pallas_kernels.ops.attention.cpu._tiling import ProgramShape
from pallas_kernels.ops.attention.sight import Sight
from pallas_kernels.parts.eight_bits import scaled_queries, scaled_results
from pallas_kernels.parts.xla.ahead_of_time import ahead_of_time
from pallas_kernels.parts.xla.one_by_one import one_by_one
from pallas_kernels.parts.xla.remembered import remembered
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.schedule.cpu.attention import GRADIENT_REFERENCE, REFERENCE, Tile, attention_tiles, gradient_tiles

_SCALE = 0.125

Program = Callable[..., tuple[jax.Array, ...]]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) of the same dtype, or int8 or float8_e4m3fn, K a divisor of N; or (P, page, K, H) with a page
            table.
        value: (B, S, K, V) or (P, page, K, V) of the dtype of `key`.
        offsets: (B,) int32, absolute position of the first query of each sequence.
        query_lengths: (B,) int32; later queries see nothing.
        key_lengths: (B,) int32; what the cache holds beyond is never seen.
        page_table: (B, n) int32, the pages of each sequence in order; entries for keys below the length must be
            in [0, P).
        bias: (B or 1, N or 1, T or 1, S or 1), added to the scaled scores.
        mask: bool of such a shape; false where a query does not see a key.
        sinks: (B or 1, N), a score for each head that joins the sum of the exponentials and belongs to no key.
        slopes: (B or 1, N), times the key's position minus the query's, added to the scaled scores.
        key_scale: (B or 1, K, H or 1), the factors of keys of 8 bits; see `EightBitContract`.
        value_scale: The same for the values.
        spec: Order of the sums, scale, cap and mask.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Guarantee: row-invariant.

    Example:
        >>> from jax import numpy as jnp
        >>> from pallas_kernels.contract import attention_contract
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
        >>> n = jnp.ones(1, jnp.int32)
        >>> attention(q, k, k, 0 * n, n, 3 * n, spec=AttentionSpec(attention_contract(), 1.0))[0].tolist()
        [[[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]]
    """
    if key_scale is not None:
        (query,) = isolate(scaled_queries(query, key_scale, key.dtype))
    caches = Cache(key, query.dtype), Cache(value, query.dtype)
    arrays = ScoreArrays.of(query, offsets, bias, mask, slopes)
    limits = (offsets, query_lengths, key_lengths)
    out, lse = _tiling.run(query, *caches, *limits, page_table, arrays, sinks, spec=spec, choose=_verified)
    if value_scale is not None:
        (out,) = isolate(out)
        (out,) = isolate(scaled_results(out, value_scale, value.dtype))
    return out, lse


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    slopes: jax.Array | None = None,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, V).
        out: (B, T, N, V), the result of the forward pass.
        lse: (B, T, N) float32, its log-sum-exp.
        cotangent: (B, T, N, V), the gradient of `out`.
        offsets: (B,) int32.
        query_lengths: (B,) int32.
        key_lengths: (B,) int32.
        bias: As in `attention`.
        mask: As in `attention`.
        slopes: As in `attention`.
        spec: Order of the sums, scale, cap and mask, as in the forward pass.

    Returns:
        The gradients of `query`, `key` and `value`, of their shapes and dtypes.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    heads, capped = key.shape[2], spec.soft_cap is not None
    shape = ProgramShape(heads, query.shape[2] // max(1, heads), key.shape[3], value.shape[3], capped)
    empty = 0 in key.shape or not value.shape[3]
    tile = next(t for t in gradient_tiles(query.shape[1], key.shape[1]) if empty or honours_gradients(t, shape))
    arrays = (query, key, value, out, lse, cotangent, offsets, query_lengths, key_lengths)
    given = ScoreArrays.of(query, offsets, bias, mask, slopes)
    return _backward.gradients(*arrays, given, spec=spec, tile=tile)


def score_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    slopes: jax.Array | None = None,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """Computes the gradients of what is added to the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Guarantee: row-invariant; a row is a query.
    """
    arrays = (query, key, value, out, lse, cotangent, offsets, query_lengths, key_lengths)
    given = ScoreArrays.of(query, offsets, bias, mask, slopes)
    return _backward.score_gradients(*arrays, given, spec=spec, tile=GRADIENT_REFERENCE)


def _verified(batch: int, queries: int, capacity: int, shape: ProgramShape) -> Tile:
    """Returns the first tile of the schedule that honours the contract."""
    return next(t for t in attention_tiles(batch, queries, capacity) if honours_contract(t, shape))


@functools.cache
@remembered
def honours_contract(tile: Tile, shape: ProgramShape) -> bool:
    """Returns whether a tile gives the reference's bits on this machine, at every position in it.

    The comparison runs once per process and shape, on normal and on widely spread values, over two blocks of keys
    (one for a tile of one block) that some rows see in full, some in part and some not at all. Its result depends on
    the machine and the jaxlib version, never on time or on the batch.

    Args:
        tile: The tile to try.
        shape: The rest of the program's shape.
    """
    if tile == REFERENCE:
        return True
    sequences, queries = np.arange(tile.sequences) % _SEQUENCES, np.arange(tile.queries) % _QUERIES
    at = np.ix_(sequences, queries)
    keys = tile.keys if tile.one_block or tile.keys < REFERENCE.keys else 2 * REFERENCE.keys
    query, key, value, first, last = _probe(shape, keys)
    given = query[at], key[sequences], value[sequences], first[at], last[at]
    actual = _compile_and_run(_probe_program(tile, shape.capped), *given)
    expected = _reference_of_probe(shape, keys)
    if _same_bits(actual, [e[at] for e in expected]):
        return True
    compiled = _compile_and_run(_probe_program(REFERENCE, shape.capped), *_probe(shape, keys))
    return _refused(tile, shape, compiled, expected)


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


@functools.cache
def _reference_of_probe(shape: ProgramShape, keys: int) -> tuple[np.ndarray, ...]:
    return one_by_one(_probe_program(REFERENCE, shape.capped), *_probe(shape, keys))


def _probe_program(tile: Tile, capped: bool) -> Program:
    def program(
        query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys, values = (contiguous_blocks(Cache(x, x.dtype), tile, REFERENCE.keys) for x in (key, value))
        what, heads, size = Sight(first, last), key.shape[2], value.shape[3]
        spec = _probe_spec(capped)
        return attend(query, keys, values, what, heads=heads, value_size=size, tile=tile, spec=spec)

    return program


@functools.cache
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
    lengths = [np.array([n], np.int32) for n in (keys - length + 5, length - 7, keys)]
    spec = _probe_spec(shape.capped)
    program, reference = (functools.partial(_backward.gradients, spec=spec, tile=t) for t in (tile, GRADIENT_REFERENCE))
    expected = one_by_one(reference, *floats, *lengths)
    if _same_bits(_compile_and_run(program, *floats, *lengths), expected):
        return True
    return _refused(tile, shape, _compile_and_run(reference, *floats, *lengths), expected)


def _same_bits(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return all((a.view(np.uint32) == e.view(np.uint32)).all() for a, e in zip(actual, expected, strict=True))


def _refused(tile: Tile, shape: ProgramShape, compiled: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    """Returns False, if it is the tile that differs and not the reference, which would take the tile's place."""
    if not _same_bits(compiled, expected):
        raise UnsupportedError(
            f"attention on a CPU: expected from the compiled reference of {shape} the bits of its operations one after"
            f" the other, got others, and others again from {tile}: this XLA joins operations across barriers."
        )
    return False


def _probe_spec(capped: bool) -> AttentionSpec:
    return AttentionSpec(attention_contract(), _SCALE, causal=True, soft_cap=2.0 if capped else None)


def _compile_and_run(program: Program, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x) for x in ahead_of_time(program, *arrays)(*arrays))
