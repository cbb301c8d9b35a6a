"""The attention kernels written in Triton on a GPU: accuracy, and bits in any batch and under any schedule."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.core.architecture import target_for
from bijax.testing import assert_bits_equal
from pallas_kernels.attention import jax_triton
from pallas_kernels.attention.call import OF_SCORES, AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.schedule.jax_triton import BackwardTiles, Tile, attention_tile
from pallas_kernels.contract import MmaAttentionContract, mma_attention_contract
from tests.goldens import cases
from tests.jax_triton.packages import skip_without_jax_triton

pytestmark = pytest.mark.gpu
skip_without_jax_triton()

LENGTH: Final = 700
HEADS: Final = 8
KEY_HEADS: Final = 2
TOKENS: Final = (0, 1, 63, 64, 65, 500, 699)


def array(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(cases.array(seed, shape, jnp.dtype(dtype)))


SLOPES, SINKS = jnp.abs(array(5, 1, HEADS)) / 8, array(6, 1, HEADS)
MASK = (array(12, 2, 1, LENGTH, LENGTH) > -0.5).at[..., 5:8, :].set(False)
BIAS = array(9, 1, HEADS, LENGTH, LENGTH)

KINDS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {},
    "float16, heads of 64, window": {"dtype": "float16", "size": 64, "window": (100, 0)},
    "heads of 80": {"size": 80},
    "heads of 192, values of 128": {"size": 192, "value_size": 128},
    "float16, heads of 256": {"dtype": "float16", "size": 256},
    "heads of 512": {"size": 512},
    "float32": {"dtype": "float32"},
    "float32, heads of 256, both sides": {"dtype": "float32", "size": 256, "causal": False},
    "cap, sinks, slopes": {"soft_cap": 5.0, "sinks": SINKS, "alibi_slopes": SLOPES},
    "bias and mask": {"bias": jnp.where(BIAS > 2, -jnp.inf, BIAS), "mask": MASK, "size": 64},
    "float32, everything": {
        "dtype": "float32",
        "size": 64,
        "soft_cap": 5.0,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
        "bias": BIAS[:, :1, :, :1].astype(jnp.bfloat16),
        "mask": MASK[:1],
    },
    "int8": {"stored": "int8"},
    "float8_e4m3fn, heads of 80": {"stored": "float8_e4m3fn", "size": 80},
}

TILES: Final = (
    Tile(16, 4, 1),
    Tile(32, 4, 2),
    Tile(64, 4, 1),
    Tile(64, 4, 3),
    Tile(64, 8, 2),
    Tile(128, 8, 1),
    Tile(128, 8, 3),
    Tile(64, 4, 3, together=True),
    Tile(128, 4, 3, together=True),
    Tile(128, 4, 3, together=True, loops=True),
    Tile(128, 8, 3, loops=True),
    Tile(128, 8, 2, held=True),
    Tile(128, 8, 3, together=True, held=True),
    Tile(64, 4, 3, held=True),
    Tile(16, 2, 3),
    Tile(16, 4, 2, apart=True),
    Tile(16, 2, 3, apart=True),
    Tile(64, 4, 1, apart=True),
    Tile(16, 2, 8, apart=True, columns=64),
    Tile(16, 2, 8, apart=True, columns=32),
    Tile(16, 4, 4, apart=True, columns=32),
)
"""Those of the table, and others."""

SPLIT: Final = 256  # so that there are several


@functools.cache
def call_of(kind: str) -> AttentionCall:
    """The call of two sequences, of which the second one is shorter than its cache."""
    options = dict(KINDS[kind])
    dtype, size = options.pop("dtype", "bfloat16"), options.pop("size", 128)
    value_size, stored = options.pop("value_size", size), options.pop("stored", None)
    of_call = {
        name: options.pop(name, default) for name, default in (("causal", True), ("window", None), ("soft_cap", None))
    }
    shapes = ((HEADS, size), (KEY_HEADS, size), (KEY_HEADS, value_size))
    q, k, v = (array(i, 2, LENGTH, *s, dtype=dtype) for i, s in enumerate(shapes))
    if stored:
        k, v = ((40 * x).astype(stored) for x in (k, v))
        widths = (size, value_size) if stored == "int8" else (1, 1)
        scales = (jnp.abs(array(i, 1, KEY_HEADS, width)) / 20 for i, width in zip((7, 8), widths, strict=True))
        options |= dict(zip(("key_scale", "value_scale"), scales, strict=True))
    limits = jnp.array([[0, LENGTH, LENGTH], [0, LENGTH, 650]], jnp.int32)
    return AttentionCall(q, k, v, limits, AttentionOptions(size**-0.5, **of_call), **options)


def ours(call: AttentionCall, tile: Tile | None = None) -> tuple[jax.Array, ...]:
    return program(contract_of(call), tile)(call)


@functools.cache
def program(contract: Any, tile: Tile | None) -> Any:
    return jax.jit(functools.partial(jax_triton.attention, contract=contract, target=target_for("cuda"), tile=tile))


def contract_of(call: AttentionCall) -> MmaAttentionContract:
    contract = mma_attention_contract(call.query.dtype.name, max(call.query.shape[3], call.value.shape[3]))
    return dataclasses.replace(contract, split=SPLIT)


@functools.cache
def whole(kind: str) -> tuple[jax.Array, ...]:
    """The results of the whole call, in which a program processes all splits."""
    call = call_of(kind)
    size = max(call.query.shape[3], call.value.shape[3])
    rows, features = LENGTH * HEADS // KEY_HEADS, target_for("cuda").features
    tile = attention_tile(size, call.query.dtype.itemsize, rows, features, heads=1, splits=1, blocks=1)
    assert not tile.apart
    return ours(call, tile)


BOUNDS: Final = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
"""Of the norm of the error over that of the result: weights and results are rounded."""
OF_8_BITS: Final = 2e-2  # queries times the scales of the keys are rounded too


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind: str) -> None:
    call = call_of(kind)
    out, lse = (np.asarray(x, np.float64) for x in whole(kind))
    expected, sums = reference(call)
    some = np.isfinite(sums)
    assert np.array_equal(np.isfinite(lse), some)
    error = np.linalg.norm((out - expected)[some]) / np.linalg.norm(expected[some])
    assert error < (BOUNDS[call.query.dtype.name] if call.key_scale is None else OF_8_BITS), error
    np.testing.assert_allclose(lse[some], sums[some], atol=1e-4 if call.key_scale is None else 5e-2, rtol=0)
    assert not out[~some].any()


def reference(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """The results and the log-sum-exp in float64."""
    names = [n for n in ("query", "key", "value", *call.present) if n != "mask"]
    numbers = {n: np.asarray(getattr(call, n).astype(jnp.float32), np.float64) for n in names}
    query, key, value = (numbers[n] for n in ("query", "key", "value"))
    if call.key_scale is not None:
        key, value = key * numbers["key_scale"][:, None], value * numbers["value_scale"][:, None]
    key, value = (np.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (key, value))
    found = np.einsum("btnh,bsnh->bnts", query, key) * call.options.scale
    if call.options.soft_cap is not None:
        found = np.tanh(found / call.options.soft_cap) * call.options.soft_cap
    position = np.arange(LENGTH)
    distance = position - position[:, None]
    if call.bias is not None:
        found = found + numbers["bias"]
    if call.alibi_slopes is not None:
        found = found + numbers["alibi_slopes"][:, :, None, None] * distance
    window = call.options.window or (LENGTH, 0 if call.options.causal else LENGTH)
    seen = (distance >= -window[0]) & (distance <= window[1])
    seen = seen & (position < np.asarray(call.limits)[:, 2, None])[:, None, None, :]
    if call.mask is not None:
        seen = seen & np.asarray(call.mask)
    found = np.where(seen, found, -np.inf)
    some = np.isfinite(found).any(-1)
    if call.sinks is not None:
        sink = np.broadcast_to(numbers["sinks"][:, :, None, None], (*found.shape[:3], 1))
        found = np.concatenate([found, np.where(some[..., None], sink, -np.inf)], axis=-1)
    highest = np.where(some, found.max(-1), 0.0)[..., None]
    weights = np.exp(found - highest)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.moveaxis(highest[..., 0] + np.log(total), 1, 2)
    weights = weights / np.where(some, total, 1.0)[..., None]
    return np.einsum("bnts,bsnh->btnh", weights[..., :LENGTH], value), lse


@pytest.mark.parametrize("kind", ["bfloat16", "heads of 80", "float32, everything", "int8"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_schedules(kind: str, tile: Tile) -> None:
    assert_bits_equal(ours(call_of(kind), tile), whole(kind))


def rows(call: AttentionCall, start: int, count: int) -> AttentionCall:
    """The call of some queries of each sequence, alone."""
    at = slice(start, start + count)
    scores = {n: x[:, :, at] for n in ("bias", "mask") if (x := getattr(call, n)) is not None and x.shape[2] > 1}
    limits = jnp.stack([call.limits[:, 0] + start, jnp.full(2, count), call.limits[:, 2]], axis=1).astype(jnp.int32)
    return dataclasses.replace(call, query=call.query[:, at], limits=limits, **scores)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_and_chunks_are_prefill(kind: str) -> None:
    call = call_of(kind)
    for count in (1, 7, 64):
        for start in TOKENS:
            if start + count <= LENGTH:
                found = ours(rows(call, start, count))
                assert_bits_equal(
                    found, tuple(x[:, start : start + count] for x in whole(kind)), err_msg=f"{count}, {start}"
                )


@pytest.mark.parametrize("kind", KINDS)
def test_decode_under_any_schedule(kind: str) -> None:
    """Of four rows, which programs for columns multiply in four copies."""
    call = call_of(kind)
    expected = tuple(x[:, 650:651] for x in whole(kind))
    narrow = max(call.query.shape[3], call.value_size) <= 128  # for wide heads, shared memory has fewer stages
    for tile in (Tile(16, 4, 1), Tile(16, 4, 1, apart=True), *(t for t in TILES if t.columns or (t.apart and narrow))):
        assert_bits_equal(ours(rows(call, 650, 1), tile), expected, err_msg=str(tile))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_and_in_pages(kind: str) -> None:
    call = call_of(kind)
    one = {n: x[1:] for n in call.present if (x := getattr(call, n)).shape[0] > 1}
    alone = dataclasses.replace(call, **{n: getattr(call, n)[1:] for n in call.of_sequences}, **one)
    assert_bits_equal(ours(alone), tuple(x[1:] for x in whole(kind)))
    for page in (20, 64):  # the first size is one of which no block is made
        room = -(-LENGTH // page)
        table = np.random.default_rng(page).permutation(2 * room + 3)[: 2 * room].reshape(2, room)

        def pages(x: jax.Array, page: int = page, table: np.ndarray = table) -> jax.Array:
            padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -LENGTH % page), (0, 0), (0, 0))).astype(x.dtype)
            cache = jnp.zeros((table.size + 3, page, *x.shape[2:]), x.dtype)
            return cache.at[table].set(padded.reshape(*table.shape, page, *x.shape[2:]))

        wider = {
            n: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -LENGTH % page)))
            for n in ("bias", "mask")
            if (x := getattr(call, n)) is not None and x.shape[3] > 1
        }
        cached = dataclasses.replace(
            call, key=pages(call.key), value=pages(call.value), page_table=jnp.asarray(table, jnp.int32), **wider
        )
        assert_bits_equal(ours(cached), whole(kind), err_msg=f"pages of {page}")


OF_BACKWARD: Final = (
    "bfloat16",
    "heads of 80",
    "float16, heads of 64, window",
    "float32",
    "float32, everything",
    "bias and mask",
)
BACKWARD_TILES: Final = (
    BackwardTiles(Tile(16, 4, 1), Tile(16, 4, 1)),
    BackwardTiles(Tile(32, 4, 2), Tile(32, 4, 2)),
    BackwardTiles(Tile(64, 4, 2), Tile(64, 4, 1)),
    BackwardTiles(Tile(64, 8, 1), Tile(64, 8, 1)),
)


@functools.cache
def backward_call(kind: str) -> tuple[AttentionCall, AttentionResults]:
    """The arguments of the backward pass of a call."""
    call = dataclasses.replace(call_of(kind).only(*OF_SCORES))
    out, lse = ours(call)
    return call, AttentionResults(out, lse, array(20, *out.shape, dtype=out.dtype))


def our_gradients(
    call: AttentionCall, results: AttentionResults, tiles: BackwardTiles | None = None, *, of_scores: bool = True
) -> tuple[jax.Array, ...]:
    return backward_program(contract_of(call), tiles, of_scores)(call, results)


@functools.cache
def backward_program(contract: Any, tiles: BackwardTiles | None, of_scores: bool) -> Any:
    options: dict[str, Any] = {"contract": contract, "target": target_for("cuda")}

    def run(call: AttentionCall, results: AttentionResults) -> tuple[jax.Array, ...]:
        found = jax_triton.gradients(call, results, tiles=tiles, **options)
        tile = None if tiles is None else tiles.queries
        return (*found, jax_triton.score_gradients(call, results, tile=tile, **options)) if of_scores else found

    return jax.jit(run)


@pytest.mark.parametrize("kind", OF_BACKWARD)
def test_gradients_under_any_schedule_and_alone(kind: str) -> None:
    call, results = backward_call(kind)
    whole_gradients = our_gradients(call, results)
    for tiles in BACKWARD_TILES:
        assert_bits_equal(our_gradients(call, results, tiles), whole_gradients, err_msg=str(tiles))
    one = {n: x[1:] for n in call.present if (x := getattr(call, n)).shape[0] > 1}
    alone = dataclasses.replace(call, **{n: getattr(call, n)[1:] for n in call.of_sequences}, **one)
    found = our_gradients(alone, jax.tree.map(lambda x: x[1:], results))
    assert_bits_equal(found, tuple(x[1:] for x in whole_gradients))
    few = rows(call, 500, 64)
    part = AttentionResults(*(x[:, 500:564] for x in (results.out, results.lse, results.cotangent)))
    found = our_gradients(few, part)
    assert_bits_equal(found[0], whole_gradients[0][:, 500:564])
    assert_bits_equal(found[3], whole_gradients[3][:, :, 500:564])


@pytest.mark.parametrize("tile", [None, *(t for t in TILES if t.apart or t.held)], ids=str)
def test_values_that_are_not_finite(tile: Tile | None) -> None:
    call = call_of("bfloat16")
    poisoned = call.value.at[0, 200, 0, 3].set(jnp.nan).at[0, 90, 1, 100].set(jnp.inf).at[1, 650:].set(jnp.nan)
    out, lse = ours(dataclasses.replace(call, value=poisoned), tile)
    sees = np.zeros(out.shape[:3], bool)
    sees[0, 200:, : HEADS // 2] = sees[0, 90:, HEADS // 2 :] = True
    assert np.isnan(np.asarray(out, np.float32)[sees]).all()
    assert np.isnan(np.asarray(lse)[sees]).all()
    expected = whole("bfloat16")
    assert_bits_equal(np.asarray(out)[~sees], np.asarray(expected[0])[~sees])
    assert_bits_equal(np.asarray(lse)[~sees], np.asarray(expected[1])[~sees])


def test_a_plain_program_has_other_bits_alone() -> None:
    """The control: the same comparison of decode with prefill for what JAX has."""
    call = call_of("float32")
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))
    prefill = attend(call.query, call.key, call.value)
    alone = jax.jit(jax.nn.dot_product_attention)
    found = [alone(call.query[:1, t : t + 1], call.key[:1, : t + 1], call.value[:1, : t + 1]) for t in TOKENS]
    assert any((np.asarray(x) != np.asarray(prefill[:1, t : t + 1])).any() for x, t in zip(found, TOKENS, strict=True))
