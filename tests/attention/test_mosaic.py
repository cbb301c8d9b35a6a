"""The attention kernels for Hopper under Mosaic's interpreter, which finds races, and as programs for a GPU."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper import attention, launch
from pallas_kernels.attention.schedule.hopper import (
    DecodeSchedule,
    PrefillSchedule,
    Problem,
    attention_schedule,
    decode_schedule,
)
from pallas_kernels.contract import (
    SPLIT_HEAD_SIZES,
    SplitAttentionContract,
    attention_contract,
)
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.attention.programs import INTERPRETER, lowered
from tests.eight_bits import UNITS, composed, times
from tests.mosaic import Races
from tests.tiers import full_only

pytestmark = pytest.mark.usefixtures("hopper")

# Small blocks, so that a few steps of the interpreter meet every edge.
CONTRACT: Final = SplitAttentionContract(key_block=32, split=64)
PREFILL: Final = PrefillSchedule(blocks=1)
DECODE: Final = DecodeSchedule(stages=2, blocks=2)
WHOLE: Final = dataclasses.replace(DECODE, whole=True)
SWAP: Final = dataclasses.replace(DECODE, swap=True)
WORKERS: Final = dataclasses.replace(SWAP, workers=2)
ONE_STAGE: Final = dataclasses.replace(DECODE, stages=1, byte_stages=3)
SWAP_CONTRACT: Final = SplitAttentionContract(split=256)  # keys as rows are 128


class Case(NamedTuple):
    """Two sequences: where the queries begin, how many there are, and how many keys."""

    offsets: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    heads: int
    schedule: PrefillSchedule | DecodeSchedule
    causal: bool = True
    window: tuple[int, int] | None = None
    page: int | None = None
    size: int = 64
    value_size: int | None = None
    soft_cap: float | None = None
    of_heads: bool = False
    stored: str | None = None
    contract: SplitAttentionContract = CONTRACT
    bias: str = ""  # its axes of B, N, T and S that are not 1
    mask: str = ""

    @property
    def sinks(self) -> np.ndarray | None:
        """Scores without keys, of all heads, if there are any."""
        return np.linspace(1, 2, self.heads, dtype=np.float32)[None] if self.of_heads else None

    @property
    def slopes(self) -> np.ndarray | None:
        """Slopes of each head of each sequence, if there are any."""
        return np.linspace(0.02, 0.2, 2 * self.heads, dtype=np.float32).reshape(2, -1) if self.of_heads else None

    def pairs(self, axes: str, seed: int) -> np.ndarray | None:
        """Numbers for pairs of queries and keys, if there are any."""
        sizes = zip("BNTS", (2, self.heads, max(self.queries), max(self.keys)), strict=True)
        shape = [size if axis in axes else 1 for axis, size in sizes]
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) if axes else None

    @property
    def bias_and_mask(self) -> dict[str, np.ndarray]:
        """The arrays of pairs that there are."""
        bias, mask = self.pairs(self.bias, 8), self.pairs(self.mask, 9)
        found = {} if bias is None else {"bias": bias}
        return found if mask is None else found | {"mask": mask > -0.5}

    @property
    def scales(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Factors of keys and values of 8 bits: of channels for int8, of heads for fp8."""
        if self.stored is None:
            return None, None
        widths = (self.size, self.value_size or self.size) if self.stored == "int8" else (1, 1)
        key, value = (np.linspace(0.02, 0.03, width, dtype=np.float32)[None, None] for width in widths)
        return key, value * np.float32(1.1)


CASES: Final = {
    "prefill": Case((0, 0), (130, 40), (130, 40), 1, PREFILL),
    "one warpgroup, window": Case(
        (0, 25), (40, 64), (40, 89), 1, dataclasses.replace(PREFILL, warpgroups=1), True, (37, 0)
    ),
    "full, pages": Case((0, 0), (7, 9), (70, 0), 1, PREFILL, False, None, 16),
    "decode": Case((69, 3), (3, 1), (72, 4), 4, DECODE),
    "decode, window, pages": Case((69, 3), (3, 0), (100, 5), 2, DECODE, False, (40, 1), 64),
    "decode, heads of 96": Case((69, 3), (3, 1), (72, 4), 4, DECODE, size=96),
    "prefill, three warpgroups": Case(
        (0, 0), (200, 9), (200, 9), 2, dataclasses.replace(PREFILL, warpgroups=3, packed=True)
    ),
    "prefill, wide heads": Case((60, 0), (70, 40), (130, 40), 2, PREFILL, size=192),
    "prefill, values of another width": Case((60, 0), (70, 40), (130, 40), 2, PREFILL, size=192, value_size=128),
    "prefill, soft cap, sinks, slopes": Case((60, 3), (70, 0), (130, 4), 2, PREFILL, soft_cap=1.5, of_heads=True),
    "decode, int8, pages": Case((69, 3), (3, 1), (72, 4), 2, DECODE, True, (40, 0), 16, stored="int8"),
    "decode, fp8, heads of 96": Case((69, 3), (3, 1), (72, 4), 2, DECODE, size=96, stored="float8_e4m3fn"),
    "decode, int8, one stage": Case((69, 3), (3, 1), (72, 4), 2, ONE_STAGE, size=256, stored="int8"),
    "decode, fp8, one stage, values of another width": Case(
        (69, 3), (3, 1), (72, 4), 2, ONE_STAGE, size=192, value_size=128, stored="float8_e4m3fn"
    ),
    "prefill, int8, pages": Case((60, 0), (70, 40), (130, 40), 1, PREFILL, page=16, stored="int8"),
    "decode, all keys at once": Case((69, 3), (3, 0), (72, 4), 4, WHOLE),
    "decode, all keys at once, window, pages": Case((69, 3), (3, 1), (100, 5), 2, WHOLE, False, (40, 1), 64),
    "decode, all keys at once, soft cap, sinks, slopes": Case(
        (69, 3), (3, 1), (72, 4), 2, WHOLE, soft_cap=1.5, of_heads=True
    ),
    "decode, keys as rows": Case((298, 3), (2, 0), (300, 4), 4, SWAP, contract=SWAP_CONTRACT),
    "decode, keys as rows, window, pages": Case(
        (269, 3), (3, 1), (300, 5), 2, SWAP, False, (40, 1), 64, 128, contract=SWAP_CONTRACT
    ),
    "decode, keys as rows, int8": Case((298, 130), (2, 1), (300, 131), 3, SWAP, stored="int8", contract=SWAP_CONTRACT),
    "decode, keys as rows, fp8, window, pages": Case(
        (269, 3), (3, 1), (300, 5), 2, WORKERS, False, (40, 1), 64, 128, stored="float8_e4m3fn", contract=SWAP_CONTRACT
    ),
    "prefill, bias": Case((60, 3), (70, 9), (130, 12), 2, PREFILL, bias="NTS"),
    "prefill, bias, mask, window": Case((60, 3), (70, 9), (130, 12), 2, PREFILL, True, (37, 0), bias="B", mask="BTS"),
    "prefill, mask of keys, slopes": Case((60, 3), (70, 9), (130, 12), 2, PREFILL, of_heads=True, mask="S"),
    "decode, bias, mask, pages": Case((69, 3), (3, 1), (72, 4), 4, DECODE, page=16, bias="BNS", mask="NTS"),
    "decode, mask, wide heads": Case((69, 3), (3, 1), (72, 4), 2, DECODE, size=192, bias="TS", mask="BT"),
    "decode, soft cap, sinks, slopes": Case((69, 3), (3, 1), (72, 4), 2, DECODE, soft_cap=1.5, of_heads=True),
}


def what_is_multiplied(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Queries, keys and values with the factors of 8 bits in them."""
    keys, values = case.scales
    if case.stored is None or keys is None or values is None:
        return [query, key, value]
    unit = np.float32(UNITS[case.stored])
    return [times(query, keys / unit), key.astype(np.float32) * unit, value.astype(np.float32) * values[:, None]]


def data(case: Case) -> list[np.ndarray]:
    """Queries, keys and values, with nan in whatever is after a length."""
    rng = np.random.default_rng(0)
    found = []
    widths = (case.size, case.size, case.value_size or case.size)
    for lengths, heads, width in zip((case.queries, case.keys, case.keys), (case.heads, 1, 1), widths, strict=True):
        x = rng.standard_normal((2, max(lengths), heads, width)).astype(jnp.bfloat16)
        if case.stored and found:
            found.append((40 * x.astype(np.float32)).astype(case.stored))
            continue
        for sequence, length in enumerate(lengths):
            x[sequence, length:] = np.nan
        found.append(x)
    return found


def attend(case: Case, query: Any, key: Any, value: Any) -> tuple[np.ndarray, np.ndarray]:
    table = None
    if case.page is not None:
        entries = -(-key.shape[1] // case.page)
        table = (
            np.random.default_rng(1).permutation(2 * entries + 1)[: 2 * entries].reshape(2, entries).astype(np.int32)
        )
        room = ((0, 0), (0, entries * case.page - key.shape[1]), (0, 0), (0, 0))

        def pages(x: np.ndarray) -> np.ndarray:
            nothing = 0 if case.stored else np.nan
            x = np.pad(x, room, constant_values=nothing)
            cache = np.full((2 * entries + 1, case.page, *x.shape[2:]), nothing, x.dtype)
            cache[table] = x.reshape(2, entries, case.page, *x.shape[2:])
            return cache

        key, value = pages(key), pages(value)
    limits = np.stack([case.offsets, case.queries, case.keys], axis=1).astype(np.int32)
    optional = dict(zip(("key_scale", "value_scale"), case.scales, strict=True)) | case.bias_and_mask
    optional |= {"page_table": table, "sinks": case.sinks, "alibi_slopes": case.slopes}
    call = AttentionCall(
        *(jnp.asarray(x) for x in (query, key, value, limits)),
        AttentionOptions(case.size**-0.5, case.causal, case.window, case.soft_cap),
        **{name: jnp.asarray(x) for name, x in optional.items() if x is not None},
    )
    out, lse = attention(call, contract=case.contract, schedule=case.schedule, interpret=INTERPRETER)
    return np.asarray(out), np.asarray(lse)


@functools.cache
def plain(name: str) -> tuple[np.ndarray, np.ndarray]:
    return attend(CASES[name], *data(CASES[name]))


def seen_by(case: Case, sequence: int) -> np.ndarray:
    """Which keys (heads, queries, keys) each query sees."""
    position = case.offsets[sequence] + np.arange(max(case.queries))[:, None]
    key = np.arange(max(case.keys))[None]
    seen = (np.arange(len(position))[:, None] < case.queries[sequence]) & (key < case.keys[sequence])
    if case.causal:
        seen &= key <= position
    if case.window is not None:
        seen &= (key >= position - case.window[0]) & (key <= position + case.window[1])
    shape = (2, case.heads, *seen.shape)
    return seen & np.broadcast_to(case.bias_and_mask.get("mask", np.bool_(True)), shape)[sequence]


@pytest.mark.tier("full", fast=("decode, all keys at once, window, pages",))
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_attend(name: str, races: Races) -> None:
    case = CASES[name]
    query, key, value = data(case)
    out, lse = plain(name)
    assert not races()
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert out.dtype == query.dtype
    query, key, value = what_is_multiplied(case, query, key, value)
    for sequence in range(2):
        seen = seen_by(case, sequence)
        some = seen.any(2).T
        q, k, v = (np.nan_to_num(np.asarray(x[sequence], np.float64)) for x in (query, key, value))
        scores = np.einsum("thd,sd->hts", q, k[:, 0]) * case.size**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        if case.slopes is not None:
            distance = np.arange(len(k)) - np.arange(len(q))[:, None] - case.offsets[sequence]
            scores = scores + case.slopes[sequence][:, None, None] * distance
        if case.bias:
            scores = scores + np.broadcast_to(case.bias_and_mask["bias"], (2, *scores.shape))[sequence]
        scores = np.where(seen, scores, -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True), -1e9)
        weights = np.exp(scores - largest)
        total = np.maximum(weights.sum(-1, keepdims=True), 1e-9)
        if case.sinks is not None:
            total = total + np.exp(case.sinks[0][:, None, None] - largest)
        expected = np.einsum("hts,sd->thd", weights / total, v[:, 0])
        log_sum = (largest + np.log(total))[..., 0].T
        np.testing.assert_allclose(out[sequence][some].astype(np.float64), expected[some], rtol=0, atol=0.02)
        np.testing.assert_allclose(lse[sequence][some], log_sum[some], rtol=0, atol=1e-5)
        assert not out[sequence][~some].any()
        assert (lse[sequence][~some] == -np.inf).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stored])
def test_8_bits_have_the_bits_of_their_contract(name: str) -> None:
    case = CASES[name]
    query, *caches = data(case)
    schedule = dataclasses.replace(case.schedule, workers=1) if "decode" in name else case.schedule
    wide = functools.partial(attend, case._replace(stored=None, schedule=schedule))
    for ours, theirs in zip(plain(name), composed(wide, query, caches, case.scales, heads=False), strict=True):
        assert_bits_equal(ours, theirs)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [name for name in CASES if "all keys at once" in name])
def test_all_keys_at_once_have_the_bits_of_merged_splits(name: str) -> None:
    case = CASES[name]
    merged = attend(case._replace(schedule=DECODE), *data(case))
    for ours, theirs in zip(plain(name), merged, strict=True):
        assert_bits_equal(ours, theirs)


# A chunk after keys of a cache, by tiles of queries and by packed tiles; the second sequence has fewer queries.
CHUNKS: Final = {
    "17 queries, pages": (Case((90, 3), (17, 0), (107, 4), 2, DECODE, page=16), WHOLE, PREFILL),
    "33 queries, window": (Case((90, 3), (33, 20), (123, 23), 2, DECODE, True, (40, 0)), WHOLE, PREFILL),
    "64 queries": (Case((70, 0), (64, 9), (134, 9), 2, DECODE), dataclasses.replace(PREFILL, packed=True)),
    "100 queries, soft cap, sinks, slopes": (
        Case((70, 3), (100, 65), (170, 68), 2, DECODE, soft_cap=1.5, of_heads=True),
        PREFILL,
    ),
    "17 queries, int8": (Case((90, 3), (17, 1), (107, 4), 4, DECODE, stored="int8"), PREFILL),
}


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_have_the_same_bits_by_either_kernel(name: str, races: Races) -> None:
    case, *others = CHUNKS[name]
    arrays = data(case)
    expected = attend(case, *arrays)
    assert np.isfinite(expected[0].astype(np.float32)).all()
    for schedule in others:
        for ours, theirs in zip(attend(case._replace(schedule=schedule), *arrays), expected, strict=True):
            assert_bits_equal(ours, theirs)
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("schedule", "outside"), [(DECODE, -1), (WHOLE, 6), (PREFILL, -1)], ids=["decode", "whole", "prefill"]
)
def test_what_is_out_of_range_gives_nan(schedule: PrefillSchedule | DecodeSchedule, outside: int) -> None:
    """A page that holds keys, and a number of queries; not a page after the last key."""
    keys = np.array([20, 70, 20])
    query = jnp.ones((3, 1, 2, 64), jnp.bfloat16)
    cache = on_device(np.random.default_rng(0).standard_normal((6, 32, 1, 64)), jnp.bfloat16)
    limits = np.stack([keys - 1, np.array([1, 1, -1]), keys], axis=1).astype(np.int32)
    table = np.array([[0, outside, outside], [1, 2, outside], [3, 4, 5]], np.int32)
    query, cache, limits, table = (jnp.asarray(x) for x in (query, cache, limits, table))
    call = AttentionCall(query, cache, cache, limits, AttentionOptions(0.1), table)
    for found in attention(call, contract=CONTRACT, schedule=schedule, interpret=INTERPRETER):
        numbers = np.asarray(found, np.float32)
        assert np.isfinite(numbers[0]).all()
        assert numbers[0].any()
        assert np.isnan(numbers[1:]).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("prefill", 50),
        ("one warpgroup, window", 20),
        ("decode, window, pages", 31),
        ("decode, keys as rows, window, pages", 230),
        ("decode, keys as rows, fp8, window, pages", 230),
        ("prefill, bias, mask, window", 50),
        ("decode, bias, mask, pages", 20),
    ],
)
def test_values_that_are_not_finite_reach_those_who_see_them(name: str, at: int, races: Races) -> None:
    """In blocks that are seen in part, where a weight of zero would keep them, and in whole ones."""
    case = CASES[name]
    query, key, value = data(case)
    poisoned = value.copy()
    poisoned[0, at, 0, 3] = np.nan if case.stored else np.inf
    poisoned[0, at, 0, 40] = np.nan
    sees = np.stack([seen_by(case, sequence)[:, :, at].T for sequence in range(2)])
    sees[1] = False
    assert sees.any()
    for ours, theirs in zip(attend(case, query, key, poisoned), plain(name), strict=True):
        assert_bits_equal(ours[~sees], theirs[~sees])
        assert np.isnan(ours[sees].astype(np.float32)).all()
    assert not races()


def test_the_interpreter_finds_a_missing_wait(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the wait for a result to leave, the next tile writes over it."""
    wait = plgpu.wait_smem_to_gmem
    only_at_the_end = lambda n, wait_read_only=False: None if wait_read_only else wait(n)  # noqa: E731
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", only_at_the_end)
    case = Case((0, 0), (8, 8), (16, 16), 1, PREFILL)
    attend(case, *data(case))
    assert races()


QUERY, KEY = (jax.ShapeDtypeStruct((2, 320, heads, 128), "bfloat16") for heads in (8, 2))
TOKEN = jax.ShapeDtypeStruct((2, 1, 8, 128), "bfloat16")
CHUNK = jax.ShapeDtypeStruct((2, 24, 8, 128), "bfloat16")
LONG = jax.ShapeDtypeStruct((2, 2048, 2, 128), "bfloat16")
PAGES = jax.ShapeDtypeStruct((40, 16, 2, 128), "bfloat16")
BYTES = jax.ShapeDtypeStruct((2, 320, 2, 128), "int8")
SCALES: Final = {"key_scale": np.ones((2, 128), np.float32), "value_scale": np.ones(2, np.float32)}
OPTIONS: Final[dict[str, Any]] = {
    "logits_soft_cap": 30.0,
    "sinks": np.ones(8, np.float32),
    "alibi_slopes": np.ones(8, np.float32),
}
TABLE, LENGTHS = jax.ShapeDtypeStruct((2, 20), "int32"), jax.ShapeDtypeStruct((2,), "int32")

causal = functools.partial(bijax.dot_product_attention, is_causal=True)


def stacked(*arrays: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays)


def many(*arrays: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Sequences for whose tiles all multiprocessors are needed."""
    return tuple(jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype) for x in arrays)


# A program and how often a kernel is launched; few queries of long sequences take a second one, which merges splits.
PROGRAMS: Final[dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]] = {
    "prefill": (causal, (QUERY, KEY, KEY), 1),
    "decode": (functools.partial(causal, query_offset=300), (TOKEN, KEY, KEY), 1),
    "chunk, long": (functools.partial(causal, query_offset=2000), (CHUNK, LONG, LONG), 2),
    "decode, long": (functools.partial(causal, query_offset=2000), (TOKEN, LONG, LONG), 2),
    "decode, long, of many": (functools.partial(causal, query_offset=2000), many(TOKEN, LONG, LONG), 1),
    "pages": (bijax.paged_attention, (TOKEN, PAGES, PAGES, TABLE, LENGTHS), 1),
    "options": (functools.partial(causal, **OPTIONS), (QUERY, KEY, KEY), 1),
    "bytes": (functools.partial(causal, query_offset=300, **SCALES), (TOKEN, BYTES, BYTES), 1),
    "bias and mask": (
        lambda q, k, bias, mask: causal(q, k, k, bias, mask),
        (QUERY, KEY, jax.ShapeDtypeStruct((1, 8, 320, 320), "float16"), jax.ShapeDtypeStruct((2, 8, 1, 320), "bool")),
        1,
    ),
    "vmap": (jax.vmap(causal), stacked(QUERY, KEY, KEY), 1),
}


@pytest.mark.tier("full", fast=("True-pages", "True-vmap"))
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wide", [False, True])
def test_programs_for_hopper_hold_the_kernels(name: str, wide: bool) -> None:
    function, arrays, launches = PROGRAMS[name]
    with jax.enable_x64(wide):
        text = lowered(function, *arrays)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == launches
    assert "stablehlo.dot_general" not in text


@pytest.mark.tier("full")
def test_large_caches_of_bytes_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "prefill, int8, pages"
    expected = plain(name)
    monkeypatch.setattr(launch, "_COPIED_BYTES", 0)
    assert_bits_equal(attend(CASES[name], *data(CASES[name])), expected)


@pytest.mark.tier("full")
@pytest.mark.parametrize("size", SPLIT_HEAD_SIZES)
def test_every_width_fits_into_shared_memory(size: int) -> None:
    """Mosaic raises where a kernel does not; tiles with several splits take most."""
    query, key, token = (jax.ShapeDtypeStruct((1, n, 2, size), "bfloat16") for n in (2048, 2048, 1))
    decode = functools.partial(causal, query_offset=2047)
    text = lowered(lambda q, t, k: (causal(q, k, k), decode(t, k, k)), query, token, key)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 3
    assert "mosaic_gpu" in lowered(decode, *many(token, key, key))


@pytest.mark.tier("full", fast=("128-128",))
@pytest.mark.parametrize(("size", "value_size"), [*((size, size) for size in SPLIT_HEAD_SIZES), (192, 128)])
def test_every_width_of_8_bits_fits_into_shared_memory(size: int, value_size: int) -> None:
    token, key, value = (
        jax.ShapeDtypeStruct((1, n, 2, width), dtype)
        for n, width, dtype in ((1, size, "bfloat16"), (2048, size, "int8"), (2048, value_size, "int8"))
    )
    scales = {name: np.ones(2, np.float32) for name in ("key_scale", "value_scale")}
    text = lowered(functools.partial(causal, query_offset=2047, **scales), token, key, value)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 2


@pytest.mark.parametrize(
    ("size", "dtype", "scale", "architecture"),
    [
        (80, "bfloat16", None, "sm_90"),
        full_only(128, "float32", None, "sm_90"),
        full_only(128, "bfloat16", -1.0, "sm_90"),
        (128, "bfloat16", None, "sm_80"),
    ],
)
def test_everything_else_gets_the_portable_program(
    size: int, dtype: str, scale: float | None, architecture: str
) -> None:
    x = jax.ShapeDtypeStruct((1, 3, 2, size), dtype)
    with bijax.lowering_for(architecture):
        assert "mosaic_gpu" not in lowered(functools.partial(causal, scale=scale), x, x, x)


def test_unsupported_calls_are_named() -> None:
    x, n = jnp.ones((1, 3, 2, 64), jnp.bfloat16), jnp.ones((1, 3), jnp.int32)
    call = AttentionCall(x, x, x, n, AttentionOptions(1.0))
    with pytest.raises(UnsupportedError, match="expected a SplitAttentionContract"):
        attention(call, contract=attention_contract())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected a scale"):
        attention(dataclasses.replace(call, options=AttentionOptions(0.0)), contract=CONTRACT)
    with pytest.raises(UnsupportedError, match="at most 8 rows"):
        attention(call, contract=CONTRACT, schedule=SWAP)
    with pytest.raises(UnsupportedError, match="a cache of 8 bits alone"):
        attention(call, contract=CONTRACT, schedule=WORKERS)


def test_keys_are_rows_where_splits_of_a_few_rows_are_merged() -> None:
    choose = functools.partial(decode_schedule, 128, tiles=8, rows=8)
    assert choose(splits=2).swap
    assert choose(splits=2, eight_bits=True).swap
    assert [choose(splits=n, eight_bits=True).workers for n in (2, 16, 17)] == [1, 1, 2]
    for other in (choose(splits=1), choose(splits=2, rows=9), decode_schedule(96, tiles=8, splits=2, rows=8)):
        assert not other.swap


def test_chunks_behind_long_caches_go_to_packed_tiles() -> None:
    """Where tiles of queries would leave multiprocessors idle, and splits do not take too much memory."""

    def choose(batch: int, queries: int, capacity: int, **other: Any) -> PrefillSchedule | DecodeSchedule:
        given = {"reach": capacity, "split": 1024, "sees_all": False, **other}
        return attention_schedule(Problem(batch, queries, 8, 4, 64, 64, capacity, **given))

    for few in (choose(1, 64, 4160), choose(1, 17, 131072), choose(1, 100, 2048), choose(64, 16, 2048)):
        assert isinstance(few, DecodeSchedule)
    for many in (choose(1, 64, 64), choose(1, 2048, 2048), choose(16, 64, 8192), choose(1, 512, 1 << 17)):
        assert isinstance(many, PrefillSchedule)
    assert isinstance(choose(1, 64, 4160, reach=320), PrefillSchedule)  # a window leaves few keys
    assert isinstance(choose(1, 256, 1 << 20), PrefillSchedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"key_block": 12}, "multiple of 8"), ({"split": 100}, "multiple of"), ({"sum_chains": 3}, "power of two")],
)
def test_contracts_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitAttentionContract(**change)
