"""The kernel of latent attention for Hopper under Mosaic's interpreter, which finds races."""

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper import latent_attention
from pallas_kernels.attention.schedule.hopper_latents import LatentSchedule
from pallas_kernels.contract import MmaAttentionContract, mma_attention_contract
from pallas_kernels.errors import UnsupportedError
from tests.attention.programs import INTERPRETER
from tests.mosaic import Races

pytestmark = pytest.mark.usefixtures("hopper")

SCHEDULES: Final = {
    f"{'whole' if whole else 'splits'}{', ahead' if ahead else ''}": LatentSchedule(whole=whole, ahead=ahead, blocks=2)
    for whole in (False, True)
    for ahead in (False, True)
} | {
    "spread": LatentSchedule(spread=64),
    "spread, 128 columns": LatentSchedule(spread=128),
}
SCALE: Final = 0.04


class Case(NamedTuple):
    """Two sequences: where the queries begin, how many there are, and how many keys; most have several splits."""

    offsets: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    heads: int
    page: int | None = None
    causal: bool = True
    split: int = 128


CASES: Final = {
    "a token": Case((198, 62), (1, 1), (199, 63), 16),
    "a chunk over a split's edge": Case((126, 3), (7, 0), (133, 3), 16),
    "pages": Case((60, 250), (5, 3), (65, 253), 24, 16),
    "pages of another size": Case((60, 120), (2, 1), (62, 121), 16, 12),
    "large pages, not causal": Case((60, 250), (3, 3), (200, 0), 12, 128, False),
    "many blocks": Case((450, 3), (1, 1), (451, 4), 16, split=512),
}


@functools.cache
def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Queries and latents, with nan in whatever is after a length."""
    case, rng = CASES[name], np.random.default_rng(0)
    query = rng.standard_normal((2, max(case.queries), case.heads, 576)).astype(jnp.bfloat16)
    keys = rng.standard_normal((2, -(-max(case.keys) // 8) * 8, 576)).astype(jnp.bfloat16)
    for sequence in range(2):
        query[sequence, case.queries[sequence] :] = np.nan
        keys[sequence, case.keys[sequence] :] = np.nan
    return query, keys


def call_of(case: Case, query: np.ndarray, keys: np.ndarray) -> AttentionCall:
    limits = np.stack([case.offsets, case.queries, case.keys], axis=1).astype(np.int32)
    options = AttentionOptions(SCALE, case.causal, latent_value_size=512)
    table, cache = None, keys[:, :, None]
    if case.page is not None:
        entries = -(-keys.shape[1] // case.page)
        table = np.random.default_rng(1).permutation(2 * entries + 1)[: 2 * entries].reshape(2, entries)
        room = ((0, 0), (0, entries * case.page - keys.shape[1]), (0, 0))
        cache = np.full((2 * entries + 1, case.page, 1, 576), np.nan, keys.dtype)
        padded = np.pad(keys.astype(np.float32), room, constant_values=np.nan).astype(keys.dtype)
        cache[table] = padded.reshape(2, entries, case.page, 1, 576)
    arrays = (jnp.asarray(x) for x in (query, cache))
    return AttentionCall(*arrays, None, jnp.asarray(limits), options, None if table is None else jnp.asarray(table))


def attend(call: AttentionCall, schedule: LatentSchedule, split: int = 128) -> tuple[np.ndarray, np.ndarray]:
    contract = MmaAttentionContract(64, 16, split=split)
    out, lse = latent_attention(call, contract=contract, schedule=schedule, interpret=INTERPRETER)
    return np.asarray(out), np.asarray(lse)


@functools.cache
def found(name: str, schedule: str) -> tuple[np.ndarray, np.ndarray]:
    return attend(call_of(CASES[name], *data(name)), SCHEDULES[schedule], CASES[name].split)


def seen_by(case: Case, sequence: int) -> np.ndarray:
    """Which keys (queries, keys) each query sees."""
    query, key = np.arange(max(case.queries))[:, None], np.arange(-(-max(case.keys) // 8) * 8)[None]
    seen = (query < case.queries[sequence]) & (key < case.keys[sequence])
    return seen & (key <= case.offsets[sequence] + query) if case.causal else seen


@pytest.mark.tier("full", fast=("a chunk over a split's edge-whole, ahead", "many blocks-spread"))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_it_attends(name: str, schedule: str, races: Races) -> None:
    case, (query, keys) = CASES[name], data(name)
    out, lse = found(name, schedule)
    assert not races()
    assert out.dtype == query.dtype
    for sequence in range(2):
        seen = seen_by(case, sequence)
        some = seen.any(1)
        q, k = (np.nan_to_num(np.asarray(x[sequence], np.float64)) for x in (query, keys))
        scores = np.where(seen[:, None], np.einsum("tnd,sd->tns", q, k) * SCALE, -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True), -1e9)
        weights = np.exp(scores - largest)
        total = np.maximum(weights.sum(-1, keepdims=True), 1e-9)
        expected = np.einsum("tns,sd->tnd", weights / total, k[:, :512])
        np.testing.assert_allclose(out[sequence][some].astype(np.float64), expected[some], rtol=0, atol=0.02)
        log_sum = (largest + np.log(total))[..., 0]
        np.testing.assert_allclose(lse[sequence][some], log_sum[some], rtol=0, atol=1e-5)
        assert not out[sequence][~some].any()
        assert (lse[sequence][~some] == -np.inf).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CASES)
def test_schedules_have_the_same_bits(name: str) -> None:
    """Of the interpreter, whose products of turned matrices differ from the others; those of a GPU do not."""
    for spread in (False, True):
        alike = [schedule for schedule, form in SCHEDULES.items() if bool(form.spread) == spread]
        expected, *others = (found(name, schedule) for schedule in alike)
        for other in others:
            for ours, theirs in zip(other, expected, strict=True):
                assert_bits_equal(ours, theirs)


@pytest.mark.tier("full")
@pytest.mark.parametrize("schedule", ["splits", "whole, ahead", "spread"])
@pytest.mark.parametrize("place", [40, 129], ids=["of a whole block", "of a block seen in part"])
@pytest.mark.parametrize(("column", "value"), [(7, np.nan), (500, np.inf), (300, -np.inf)], ids=str)
def test_values_that_are_not_finite_reach_the_rows_that_see_them(
    place: int, column: int, value: float, schedule: str
) -> None:
    name = "a chunk over a split's edge"
    case, (query, keys) = CASES[name], data(name)
    expected = found(name, schedule)
    keys = keys.copy()
    keys[0, place, column] = value
    others = attend(call_of(case, query, keys), SCHEDULES[schedule])
    sees = case.offsets[0] + np.arange(7) >= place
    for ours, theirs in zip(others, expected, strict=True):
        assert_bits_equal(ours[1:], theirs[1:])
        assert_bits_equal(ours[0][~sees], theirs[0][~sees])
        assert np.isnan(ours[0][sees].astype(np.float32)).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("schedule", ["splits", "whole", "spread"])
def test_what_is_out_of_range_gives_nan(schedule: str) -> None:
    """A page that holds keys, and a number of queries; not a page after the last key."""
    case = Case((19, 69), (1, 1), (20, 70), 16, 16)
    query, keys = (np.ones(shape, jnp.bfloat16) for shape in ((2, 1, 16, 576), (2, 80, 576)))
    call = call_of(case, query, keys)
    table, limits = np.array(call.page_table), np.array(call.limits)
    table[0, 2:], table[1, 4] = -1, 99
    out, lse = attend(dataclasses.replace(call, page_table=jnp.asarray(table)), SCHEDULES[schedule])
    assert np.isfinite(out[0].astype(np.float32)).all()
    limits[0, 1] = -1
    wrong, wrong_lse = attend(dataclasses.replace(call, limits=jnp.asarray(limits)), SCHEDULES[schedule])
    for numbers in (out[1], lse[1], wrong[0], wrong_lse[0]):
        assert np.isnan(numbers.astype(np.float32)).all()


def test_it_refuses_what_it_does_not_serve() -> None:
    call = call_of(CASES["a token"], *data("a token"))
    contract = mma_attention_contract("bfloat16", 576)
    options: list[dict[str, Any]] = [
        {"options": dataclasses.replace(call.options, soft_cap=3.0)},
        {"options": dataclasses.replace(call.options, window=(5, 0))},
        {"options": dataclasses.replace(call.options, latent_value_size=448)},
        {"query": call.query.astype(jnp.float32), "key": call.key.astype(jnp.float32)},
    ]
    for given in options:
        with pytest.raises(UnsupportedError, match="latent attention on a Hopper GPU: expected 576 columns"):
            latent_attention(dataclasses.replace(call, **given), contract=contract)
    with pytest.raises(UnsupportedError, match="expected an MmaAttentionContract of version 3 with blocks of 64"):
        latent_attention(call, contract=MmaAttentionContract(32, 16))


def test_a_call_without_keys() -> None:
    call = call_of(CASES["a token"], *data("a token"))
    call = dataclasses.replace(call, key=call.key[:, :0])
    out, lse = latent_attention(call, contract=mma_attention_contract("bfloat16", 576))
    assert not jax.device_get(out).any()
    assert bool((lse == -jnp.inf).all())
