"""Attention's gradients: a query's bits in any batch and chunk, a sequence's in any batch and under any padding."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, bits, hostile_rows
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.cpu import launch as cpu
from pallas_kernels.attention.schedule.cpu import GRADIENT_REFERENCE, Tile, gradient_tiles
from pallas_kernels.contract import attention_contract

HEADS, KEY_HEADS, SIZE, LENGTH = 4, 2, 8, 150

Arrays = tuple[np.ndarray, ...]


@functools.cache
def sequences(dtype: str) -> Arrays:
    """Queries, cotangents, keys and values of one sequence of every hostile kind."""
    found = []
    for seed, heads in enumerate((HEADS, HEADS, KEY_HEADS, KEY_HEADS)):
        kinds = hostile_rows(seed, (LENGTH, heads, SIZE), dtype)
        kinds["linspace"] = (kinds["linspace"].astype(np.float32) / 50).astype(kinds["linspace"].dtype)
        found.append(np.stack([kinds[name] for name in sorted(kinds)]))
    return tuple(found)


@functools.partial(jax.jit, static_argnames=("window",))
def gradients(
    q: Any, ct: Any, k: Any, v: Any, offsets: Any, used: Any, window: tuple[int, int] | None = None
) -> tuple[jax.Array, ...]:
    """The output and the gradients of queries, keys and values."""

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return bijax.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_offset=offsets,
            query_seq_lengths=used,
            key_value_seq_lengths=offsets + used,
            local_window_size=window,
        )

    out, pull = jax.vjp(attend, q, k, v)
    return (out, *pull(ct))


@functools.cache
def whole(dtype: str) -> Arrays:
    zero = np.zeros(len(sequences(dtype)[0]), np.int32)
    return tuple(np.asarray(x) for x in gradients(*sequences(dtype), zero, zero + LENGTH))


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sequences_keep_their_bits_in_a_batch(dtype: str) -> None:
    arrays = sequences(dtype)
    zero = np.zeros(len(arrays[0]), np.int32)
    # `gradients` is jitted, so as it is; thus the tests share its compilations.
    assert_batch_invariant(
        gradients,
        *arrays,
        zero,
        zero + LENGTH,
        batch_sizes=(1, 9) if dtype == "float32" else (1, 2),
        neighbours=("permuted", "huge", "nan") if dtype == "float32" else ("permuted",),
        modes=("eager",),
    )


@pytest.mark.tier("full")
@pytest.mark.parametrize("garbage", [0.0, np.nan, -np.inf])
def test_padding_leaves_no_trace(garbage: float) -> None:
    arrays = sequences("float32")
    n = len(arrays[0])

    def padded(x: np.ndarray, length: int) -> np.ndarray:
        out = np.full((n, length, *x.shape[2:]), garbage, np.float32)
        out[:, :LENGTH] = x
        return out

    zero = np.zeros(n, np.int32)
    lengths = (161, 161, 300, 300)
    cut = (padded(x, m) for x, m in zip(arrays, lengths, strict=True))
    found = [np.asarray(x) for x in gradients(*cut, zero, zero + LENGTH)]
    assert_bits_equal([x[:, :LENGTH] for x in found], list(whole("float32")))
    for x in found:
        assert not x[:, LENGTH:].any()


@pytest.mark.tier("full")
def test_queries_of_a_chunk_keep_their_bits() -> None:
    q, ct, k, v = sequences("float32")
    for start in (0, 5, 100, 137):
        offsets = np.full(len(q), start, np.int32)
        stop = min(LENGTH, start + 13)
        query, cotangent = (np.zeros((len(q), 13, HEADS, SIZE), np.float32) for _ in range(2))
        query[:, : stop - start], cotangent[:, : stop - start] = q[:, start:stop], ct[:, start:stop]
        out, dq, _, _ = map(np.asarray, gradients(query, cotangent, k, v, offsets, offsets * 0 + stop - start))
        expected = [x[:, start:stop] for x in whole("float32")[:2]]
        assert_bits_equal([x[:, : stop - start] for x in (out, dq)], expected, err_msg=f"{start=}")


def test_query_blocks_stand_at_absolute_positions() -> None:
    """A chunk's gradient of the keys is that of the whole sequence whose other queries have no cotangent."""
    q, ct, k, v = (x[sorted(hostile_rows(0, (1,), "float32")).index("normal")][None] for x in sequences("float32"))
    zero = np.zeros(1, np.int32)
    start = 37
    moved = [np.pad(x[:, start:], ((0, 0), (0, start), (0, 0), (0, 0))) for x in (q, ct)]
    chunk = gradients(*moved, k, v, zero + start, zero + LENGTH - start)
    later = np.where(np.arange(LENGTH)[:, None, None] < start, np.float32(0), ct)
    alone = gradients(q, later, k, v, zero, zero + LENGTH)
    assert_bits_equal(chunk[2:], alone[2:])


def test_a_nan_reaches_only_what_has_seen_it() -> None:
    q, ct, k, v = (x[sorted(hostile_rows(0, (1,), "float32")).index("normal")][None] for x in sequences("float32"))
    zero = np.zeros(1, np.int32)
    plain = [np.asarray(x) for x in gradients(q, ct, k, v, zero, zero + LENGTH)]
    at = 60
    for i in range(4):  # queries, cotangents, keys, values
        arrays = [x.copy() for x in (q, ct, k, v)]
        arrays[i][:, at] = np.nan
        _, dq, dk, dv = map(np.asarray, gradients(*arrays, zero, zero + LENGTH))
        # Queries and cotangents belong to one row, keys and values are seen by the rows from there on.
        rows = slice(at, at + 1) if i < 2 else slice(at, None)
        zero_fill = np.ones(LENGTH, bool)
        zero_fill[rows] = False
        assert_bits_equal(dq[:, zero_fill], plain[1][:, zero_fill])
        assert np.isnan(dq[:, rows]).all()
        assert np.isnan(dk[:, :at]).all()
        if i < 2:
            assert_bits_equal([dk[:, at + 1 :], dv[:, at + 1 :]], [x[:, at + 1 :] for x in plain[2:]])
            assert np.isnan(dv[:, :at]).all()


@pytest.mark.tier("full")
def test_transformations_keep_the_bits() -> None:
    q, ct, k, v = (x[:4] for x in sequences("float32"))
    expected = [x[:4] for x in whole("float32")[1:]]

    def single(q: Any, k: Any, v: Any, ct: Any) -> list[jax.Array]:
        pull = jax.vjp(functools.partial(bijax.dot_product_attention, is_causal=True), q, k, v)[1]
        return list(pull(ct))

    assert_bits_equal(jax.vmap(single)(q, k, v, ct), expected)
    assert_bits_equal(jax.lax.map(lambda x: single(*x), (q, k, v, ct)), expected)

    @jax.checkpoint
    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return bijax.dot_product_attention(q, k, v, is_causal=True)

    assert_bits_equal(list(jax.vjp(attend, q, k, v)[1](ct)), expected)
    with jax.enable_x64(True):
        assert_bits_equal(single(q, k, v, ct), expected)


@pytest.mark.tier("full")
def test_tiles_agree() -> None:
    """A tile that does not agree is not used, so this is about speed: a machine where it fails is slow."""
    for tile in gradient_tiles(1000, 100):
        assert cpu.honours_gradients(tile, ProgramShape(1, 9, 64, 64))


def test_chains_are_chosen_without_the_batch() -> None:
    contract = attention_contract()
    for group in (1, 3, 8, 9, 32, 64):
        chain = contract.chain_rows(group)
        assert chain <= contract.longest_chain
        assert contract.query_block * group % chain == 0
    assert gradient_tiles(16, 100) == (GRADIENT_REFERENCE,)
    assert gradient_tiles(17, 129)[0] == Tile(1, 64)
    assert gradient_tiles(17, 128)[0] == Tile(1, 64, one_block=True)


def test_control_plain_jax_differs() -> None:
    """The same comparison finds that the gradients of jax.nn's attention change with the length of the sequence."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 50, h, 64)).astype(np.float32) for h in (4, 4, 2, 2)]

    @jax.jit
    def plain(q: Any, ct: Any, k: Any, v: Any) -> Any:
        return jax.vjp(functools.partial(jax.nn.dot_product_attention, is_causal=True), q, k, v)[1](ct)

    whole = plain(*arrays)
    starts = [plain(*(x[:, :length] for x in arrays)) for length in (33,)]
    assert any((bits(dq) != bits(whole[0][:, : dq.shape[1]])).any() for dq, _, _ in starts)
