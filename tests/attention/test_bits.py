"""Attention: a query's bits in any batch, chunk and cache, in every dtype, and the contract itself, emulated."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, bits, hostile_rows
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.call import AttentionOptions
from pallas_kernels.attention.cpu import launch as cpu
from pallas_kernels.attention.schedule.cpu import REFERENCE, Tile, attention_tiles
from tests.tiers import full_only

DTYPES = ("float32", "bfloat16", "float16")
HEADS, KEY_HEADS, SIZE = 4, 2, 16
LENGTH, CAPACITY = 150, 256

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def sequences(dtype: str, length: int = LENGTH) -> Arrays:
    """Queries, keys and values of one sequence of every hostile kind."""
    found = []
    for seed, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS)):
        kinds = hostile_rows(seed, (length, heads, SIZE), dtype)
        kinds["linspace"] = (kinds["linspace"].astype(np.float32) / 50).astype(kinds["linspace"].dtype)
        found.append(np.stack([kinds[name] for name in sorted(kinds)]))
    return found[0], found[1], found[2]


@functools.partial(jax.jit, static_argnames=("window",))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    used: jax.Array,
    window: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The queries that are used, from an offset on, of sequences that end with them."""
    return bijax.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        query_offset=offsets,
        query_seq_lengths=used,
        key_value_seq_lengths=offsets + used,
        local_window_size=window,
        return_residual=True,
    )


def options(window: tuple[int, int] | None) -> dict[str, Any]:
    """Nothing where there is no window: jit takes a default that is spelled out for another function."""
    return {} if window is None else {"window": window}


@functools.cache
def whole(dtype: str, window: tuple[int, int] | None = None) -> tuple[np.ndarray, ...]:
    q, k, v = sequences(dtype)
    zero = np.zeros(len(q), np.int32)
    return tuple(np.asarray(x) for x in attend(q, k, v, zero, zero + LENGTH, **options(window)))


def stored(x: np.ndarray, length: int, garbage: float, capacity: int) -> np.ndarray:
    """A cache with the first tokens of x and garbage after them."""
    cache = np.full((x.shape[0], capacity, *x.shape[2:]), garbage).astype(x.dtype)
    cache[:, :length] = x[:, :length]
    return cache


def chunk(x: np.ndarray, start: int, used: int, given: int, garbage: float) -> np.ndarray:
    """Queries start, start + 1, ... of x, followed by garbage."""
    queries = np.full((x.shape[0], given, *x.shape[2:]), garbage).astype(x.dtype)
    queries[:, :used] = x[:, start : start + used]
    return queries


@pytest.mark.tier("full", fast=("(1, 9)-float32",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 9), (3,)], ids=str)
def test_sequences_keep_their_bits_in_a_batch(dtype: str, sizes: tuple[int, ...]) -> None:
    q, k, v = sequences(dtype)
    lengths = np.arange(len(q), dtype=np.int32) * 17 + 5

    # `attend` is jitted, so as it is; thus the tests share its compilations.
    assert_batch_invariant(attend, q[:, :1], k, v, lengths - 1, lengths * 0 + 1, batch_sizes=sizes, modes=("eager",))


# The sequence is cut into chunks of these sizes, beginning at some of these tokens.
CUTS = {
    1: [*range(0, LENGTH, 29), 126, 127, 128, 129, LENGTH - 1],
    7: [*range(0, LENGTH, 49), 125, LENGTH - 4],
    64: [0, 64, 128, 100],
}


@pytest.mark.tier("full", fast=("bfloat16-None-(1, 64)",))
@pytest.mark.parametrize(
    ("dtype", "window", "sizes"),
    [
        ("float32", None, (1, 7, 64)),
        ("bfloat16", None, (1, 64)),
        ("float16", None, (1, 7)),
        ("float32", (40, 3), (7,)),
    ],
)
def test_every_way_to_cut_a_sequence(dtype: str, window: tuple[int, int] | None, sizes: tuple[int, ...]) -> None:
    """Token by token and in chunks, from a longer cache with garbage in it: the bits of the whole."""
    q, k, v = sequences(dtype)
    garbage = iter([np.nan, np.inf, -3.0, 0.0] * 50)
    for size in sizes:
        for start in CUTS[size]:
            used, bad = min(size, LENGTH - start), next(garbage)
            queries = chunk(q, start, used, size, bad)
            offsets = np.full(len(q), start, np.int32)
            capacity = LENGTH if size == 1 else CAPACITY
            keys, values = (stored(x, start + used, bad, capacity) for x in (k, v))
            out, lse = (
                np.asarray(x) for x in attend(queries, keys, values, offsets, offsets * 0 + used, **options(window))
            )
            expected = [x[:, start : start + used] for x in whole(dtype, window)]
            assert_bits_equal([out[:, :used], lse[:, :used]], expected, err_msg=f"{size=} {start=} {bad=}")
            assert not bits(out[:, used:]).any()
            assert (lse[:, used:] == -np.inf).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("page", [5, 16, 48, 256])
def test_pages_hold_the_same_sequences(page: int) -> None:
    """Pages of any size and order, with garbage around the sequences and in the unused part of the table."""
    dtype = "bfloat16" if page == 16 else "float32"
    q, k, v = sequences(dtype)
    rng = np.random.default_rng(page)
    entries = -(-CAPACITY // page)
    paged = jax.jit(functools.partial(bijax.paged_attention, return_residual=True))
    for length, used in ((LENGTH, 1), (129, 1), (77, 1)):
        table = rng.permutation(len(q) * entries + 3)[: len(q) * entries].reshape(len(q), entries)
        caches = []
        for x in (k, v):
            pages = np.full((len(q) * entries + 3, page, KEY_HEADS, SIZE), np.nan).astype(x.dtype)
            at = np.arange(length)
            pages[table[:, at // page], at % page] = x[:, :length]
            caches.append(pages)
        table[:, -(-length // page) :] = -1
        queries = q[:, length - used : length]
        out = paged(queries, *caches, table.astype(np.int32), np.full(len(q), length, np.int32))
        assert_bits_equal(list(out), [x[:, length - used : length] for x in whole(dtype)], err_msg=f"{page=} {length=}")


@pytest.mark.tier("full")
def test_a_chunk_from_pages() -> None:
    q, k, v = sequences("float32")
    pages = [x[:, :144].reshape(-1, 48, KEY_HEADS, SIZE) for x in (k, v)]
    table = np.arange(3 * len(q)).reshape(len(q), 3)
    out = bijax.paged_attention(q[:, 137:144], *pages, table, 144)
    assert_bits_equal(out, whole("float32")[0][:, 137:144])


@pytest.mark.tier("full", fast=("inf",))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_that_come_later_leave_no_trace(bad: float) -> None:
    q, k, v = (x[sorted(hostile_rows(0, (1,), "float32")).index("normal")][None] for x in sequences("float32"))
    zero = np.zeros(1, np.int32)

    def attended(*arrays: np.ndarray) -> np.ndarray:
        return np.asarray(attend(*arrays, zero, zero + LENGTH)[0])

    def with_bad(x: np.ndarray, *index: Any) -> np.ndarray:
        x = x.copy()
        x[index] = bad
        return x

    plain = attended(q, k, v)
    for at in (1, 60, 140):
        out = attended(*(with_bad(x, 0, at) for x in (q, k, v)))
        assert_bits_equal(out[:, :at], plain[:, :at], err_msg=f"{at=}")
        assert np.isnan(out[:, at:]).all()
        # A single value is seen for what it is, and by its own column alone.
        out = attended(q, k, with_bad(v, 0, at, 0, 3))
        changed = np.zeros(out.shape, bool)
        changed[:, at:, : HEADS // KEY_HEADS, 3] = True
        assert_bits_equal(np.where(changed, 0, out), np.where(changed, 0, plain), err_msg=f"{at=}")
        np.testing.assert_array_equal(out[changed], bad)


def test_signs_of_masked_values_leave_no_trace() -> None:
    """A weight of zero times a negative value is -0, which must not turn an underflowed sum around."""
    q, k = np.zeros((1, 1, HEADS, SIZE), np.float32), np.zeros((1, 70, KEY_HEADS, SIZE), np.float32)
    results = []
    for masked in (1.0, -1.0, 0.0):
        values = np.full(k.shape, masked, np.float32)
        values[:, 0] = -1e-45
        results.append(bijax.dot_product_attention(q, k, values, key_value_seq_lengths=1))
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.tier("full")
@pytest.mark.parametrize("every", [False, full_only(True)], ids=["few", "every"])
def test_transformations_keep_the_bits(every: bool) -> None:
    q, k, v = sequences("float32")
    q, lengths = q[:, 8:9], np.asarray([9, 4, 1, 150, 7, 0, 129, 64, 65], np.int32)

    def f(q: Any, k: Any, v: Any, n: Any) -> jax.Array:
        return bijax.dot_product_attention(q, k, v, key_value_seq_lengths=n)

    def single(q: Any, k: Any, v: Any, n: Any) -> jax.Array:
        return f(q[None], k[None], v[None], n[None])[0]

    arrays = (q, k, v, lengths)
    y = np.asarray(jax.jit(f, donate_argnums=0)(*arrays))
    moved = (np.moveaxis(q, 0, 1), np.moveaxis(k, 0, 2), np.moveaxis(v, 0, -1), lengths)
    assert_bits_equal(jax.vmap(single, in_axes=(1, 2, -1, 0), out_axes=1)(*moved), np.moveaxis(y, 0, 1))
    if not every:
        return
    assert_bits_equal(jax.lax.scan(lambda c, x: (c, single(*x)), 0, arrays)[1], y)
    assert_bits_equal(bijax.dot_product_attention(q[3], k[3], v[3]), y[3])
    assert_bits_equal(f(*arrays), y)
    assert_bits_equal(jax.vmap(single)(*arrays), y)
    nested = jax.vmap(jax.vmap(single))(*(x.reshape(3, 3, *x.shape[1:]) for x in arrays))
    assert_bits_equal(nested.reshape(y.shape), y)
    shared = jax.vmap(single, in_axes=(0, None, None, None))(q, k[0], v[0], lengths[0])
    assert_bits_equal(shared, f(q, *(np.stack([x[0]] * 9) for x in (k, v)), np.stack([lengths[0]] * 9)))
    assert_bits_equal(jax.checkpoint(f)(*arrays), y)
    value = jax.value_and_grad(lambda q: (f(q, k, v, lengths).sum(), f(q, k, v, lengths)), has_aux=True)(q)[0][1]
    assert_bits_equal(value, y)
    with jax.enable_x64(True):
        assert_bits_equal(jax.jit(f)(q, k, v, lengths.astype(np.int64)), y)
    assert_bits_equal(single(q[3], k[3], v[3], lengths[3]), y[3])


@pytest.mark.tier("full")
def test_pages_under_vmap() -> None:
    q, k, v = (x[:, :8] for x in sequences("float32"))
    q, pages = q[:, :1], [x.reshape(18, 4, *x.shape[2:]) for x in (k, v)]
    table, lengths = np.arange(18).reshape(9, 2), np.asarray([8, 3, 5, 1, 2, 7, 8, 4, 6], np.int32)
    y = np.asarray(bijax.paged_attention(q, *pages, table, lengths))

    def single(q: Any, key_pages: Any, value_pages: Any, table: Any, n: Any) -> jax.Array:
        return bijax.paged_attention(q[None], key_pages, value_pages, table[None], n[None])[0]

    assert_bits_equal(jax.vmap(single, in_axes=(0, None, None, 0, 0))(q, *pages, table, lengths), y)
    tables = np.stack([np.stack([np.full(9, entry), np.arange(9, 18)], axis=1) for entry in range(2)])
    prefixed = jax.vmap(lambda table: bijax.paged_attention(q, *pages, table, lengths, common_prefix_length=4))
    each = [bijax.paged_attention(q, *pages, t, lengths) for t in tables]
    assert_bits_equal(prefixed(tables), jnp.stack(each))
    own = [x.reshape(9, 2, 4, *x.shape[2:]) for x in (k, v)]
    assert_bits_equal(jax.vmap(single)(q, *own, np.tile(np.arange(2), (9, 1)), lengths), y)


# Heads, query heads to a key head, width.
@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((3, 3, 64, 64), [Tile(1, 64), Tile(1, 16, 64), Tile(1, 64, 64, one_block=True), Tile(8, 1, crossed=True)]),
        ((1, 1, 80, 48), [Tile(3, 4)]),
    ],
)
def test_tiles_agree(shape: tuple[int, int, int, int], tiles: list[Tile]) -> None:
    """A tile that does not agree is not used, so this is about speed: a machine where it fails is slow."""
    assert all(cpu.honours_contract(t, ProgramShape(*shape)) for t in tiles)


def test_a_tile_with_other_bits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison: a scale that differs in its last bit."""
    right = cpu.attend

    def wrong(*args: Any, tile: Tile, options: AttentionOptions, **others: Any) -> Any:
        if tile._replace(finite=False) != REFERENCE:
            options = dataclasses.replace(options, scale=float(np.nextafter(np.float32(options.scale), 1)))
        return right(*args, tile=tile, options=options, **others)

    shape = ProgramShape(KEY_HEADS, HEADS // KEY_HEADS, SIZE, SIZE)
    tile = Tile(8, 1)  # of other tests
    assert cpu.honours_contract(tile, shape)
    monkeypatch.setattr(cpu, "attend", wrong)
    assert not cpu.honours_contract.__wrapped__(tile, shape)


def test_every_call_has_a_tile() -> None:
    calls = itertools.product((1, 3, 8, 100), (1, 2, 16, 17, 1000), (1, 64, 65, 4096), (1, 3, 8), (64, 300))
    for batch, queries, capacity, heads, size in calls:
        tiles = attention_tiles(batch, queries, capacity, heads=heads, size=size)
        assert tiles[-1] == REFERENCE
        assert all(t.sequences <= batch for t in tiles)
        assert all(t.keys == REFERENCE.keys or capacity <= t.keys for t in tiles)
        assert tiles[0].one_block == (capacity <= REFERENCE.keys and tiles[0] != REFERENCE)
        assert tiles[0].crossed == (queries == 1 and heads == 3 and size == 64)


def fused(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The chain s = fma(x[i], y[i], s) upwards over the last axis.

    The float64 product of two float32 is exact and its sum with a float32 rounds only in the 54th bit; rounding that
    to float32 gives the fused result but for rare double roundings, which the fixed data below do not meet.
    """
    total = np.zeros(np.broadcast_shapes(x.shape, y.shape)[:-1], np.float32)
    for i in range(x.shape[-1]):
        total = (x[..., i].astype(np.float64) * y[..., i] + total).astype(np.float32)
    return total


@pytest.mark.parametrize("size", [80, full_only(256)])
def test_scores_are_one_fused_chain(size: int) -> None:
    """The log-sum-exp of a single score is the score."""
    rng = np.random.default_rng(size)
    q = rng.standard_normal((1, 1, 12, size)).astype(np.float32)
    k = rng.standard_normal((1, 65, 1, size)).astype(np.float32)
    _, lse = bijax.dot_product_attention(q, k, k, key_value_seq_lengths=1, return_residual=True)
    assert_bits_equal(lse, fused(q, k[:, :1]) * np.float32(1 / np.sqrt(size)))


@pytest.mark.parametrize("size", [8, full_only(16), full_only(80), full_only(512)])
def test_values_are_chains_of_one_block_each(size: int) -> None:
    """With equal scores every weight is 1: only the order of the sums remains."""
    v = np.random.default_rng(0).standard_normal((1, 300, KEY_HEADS, size)).astype(np.float32)
    out, lse = bijax.dot_product_attention(np.zeros((1, 1, HEADS, size), np.float32), v * 0, v, return_residual=True)
    total = np.zeros(v.shape[2:], np.float32)
    for start in range(0, 300, 128):
        block = np.zeros_like(total)
        for row in v[0, start : start + 128]:
            block = block + row
        total = total + block
    assert_bits_equal(out[0, 0], np.repeat(total / np.float32(300), HEADS // KEY_HEADS, axis=0))
    np.testing.assert_allclose(lse, np.log(300), rtol=1e-6)


def test_control_plain_jax_differs() -> None:
    """The same harness finds that jax.nn's attention changes bits with the batch and with the chunk."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 150, h, 64)).astype(np.float32) for h in (4, 2, 2))
    plain = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")
    whole = np.asarray(plain(q, k, v, is_causal=True))
    last = plain(q[:, -1:], k, v)
    report = batch_variance_report(plain, q[:, -1:], k, v, batch_sizes=(1, 2, 9), modes=("jit",))
    assert report.differing_elements + np.count_nonzero(bits(last) != bits(whole[:, -1:])) > 0
