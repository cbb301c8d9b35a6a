"""Splits that all sequences share, under Mosaic's interpreter: the bits of sequences that read each their own."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper import attention
from pallas_kernels.attention.schedule.hopper import DecodeSchedule
from pallas_kernels.contract import SPLIT_HEAD_SIZES, SplitAttentionContract
from tests.attention.programs import INTERPRETER
from tests.jax_triton.packages import HAS_JAX_TRITON, launches_in
from tests.mosaic import Races
from tests.tiers import full_only

pytestmark = pytest.mark.usefixtures("hopper")

CONTRACT: Final = SplitAttentionContract(key_block=32, split=64)
SCHEDULE: Final = DecodeSchedule(stages=2, blocks=3)
SIZE: Final = 64


class Case(NamedTuple):
    """Sequences of which the last queries are computed.

    Attributes:
        queries: Of each sequence.
        keys: Of each.
        group: Query heads, of one key head.
        common: Keys that all begin with.
        shared: Splits that are read once, for all.
        page: Keys of a page.
        stored: Dtype of a cache of 8 bits.
        options: Further options of the call.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    group: int
    common: int
    shared: int
    page: int = 16
    stored: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012


CASES: Final = {
    "tiles of several sequences": Case((1, 1), (65, 97), 37, 64, 1),
    "several queries, tiles and splits": Case((2, 1, 2), (130, 129, 200), 14, 144, 2),
    "as many keys as are shared, none": Case((1, 1, 0, 1), (64, 130, 0, 65), 3, 70, 1),
    "a sequence ends before": Case((1, 1), (63, 130), 4, 144, 0),
    "queries in the prefix": Case((3, 1), (130, 190), 2, 144, 1),
    "int8, soft cap, sinks": Case((1, 1), (70, 140), 5, 128, 1, stored="int8", options={"soft_cap": 2.0}),
    "pages that blocks cannot be copied from": Case((1, 2), (130, 150), 4, 129, 1, page=24),
}


def attend(case: Case, *, together: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pages of shared splits are listed for the first sequence alone where they are read together: nan for others."""
    rng, batch = np.random.default_rng(0), len(case.keys)
    entries = -(-max(case.keys) // case.page)
    nothing = 0 if case.stored else np.nan
    caches = []
    for _ in range(2):
        x = rng.standard_normal((batch * entries + 1, case.page, 1, SIZE)).astype(jnp.bfloat16)
        x = (40 * x.astype(np.float32)).astype(case.stored) if case.stored else x
        x[-1] = nothing
        caches.append(x)
    table = rng.permutation(batch * entries).reshape(batch, entries).astype(np.int32)
    common = case.common // case.page
    table[:, :common] = table[0, :common]
    if together:
        table[1:, : case.shared * CONTRACT.split // case.page] = batch * entries
    query = rng.standard_normal((batch, max(case.queries), case.group, SIZE)).astype(jnp.bfloat16)
    first = [keys - queries for keys, queries in zip(case.keys, case.queries, strict=True)]
    limits = np.stack([first, case.queries, case.keys], axis=1).astype(np.int32)
    call = AttentionCall(
        *(jnp.asarray(x) for x in (query, *caches, limits)),
        AttentionOptions(SIZE**-0.5, causal=True, **case.options),
        page_table=jnp.asarray(table),
        common_prefix=jnp.array([case.common], jnp.int32) if together else None,
    )
    if case.stored:
        factors, sinks = jnp.full((1, 1, 1), 0.02, jnp.float32), jnp.linspace(1, 2, case.group)[None]
        call = replace(call, key_scale=factors, value_scale=factors, sinks=sinks)
    out, lse = attention(call, contract=CONTRACT, schedule=SCHEDULE, interpret=INTERPRETER)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [name if name == "tiles of several sequences" else full_only(name) for name in CASES])
def test_shared_splits_have_the_bits_of_own_ones(name: str, races: Races) -> None:
    case = CASES[name]
    found = attend(case, together=True)
    assert not races()
    assert np.isfinite(found[0].astype(np.float32)).all()
    for ours, theirs in zip(found, attend(case, together=False), strict=True):
        assert_bits_equal(ours, theirs)


def call(**changes: Any) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """A program of a decode step, and its arrays."""
    size, batch, options = changes.pop("size", 128), changes.pop("batch", 64), changes
    query = jax.ShapeDtypeStruct((batch, 1, 8, size), "bfloat16")
    pages = jax.ShapeDtypeStruct((40, 16, 2, size), "bfloat16")
    table, lengths = jax.ShapeDtypeStruct((batch, 128), "int32"), jax.ShapeDtypeStruct((batch,), "int32")

    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any, common: Any) -> Any:
        return bijax.paged_attention(q, k, v, table, lengths, common_prefix_length=common, **options)

    return step, (query, pages, pages, table, lengths, jax.ShapeDtypeStruct((), "int32"))


def kernels(function: Callable[..., Any], arrays: tuple[jax.ShapeDtypeStruct, ...]) -> list[int]:
    """How many arrays each kernel of the program is given."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return [given.count("%") for given in re.findall(r"custom_call @mosaic_gpu\w*\(([^)]*)\)", text)]


@pytest.mark.parametrize("dtype", ["bfloat16", full_only("float32")])
def test_other_kernels_take_a_common_prefix_too(dtype: str) -> None:
    """It changes no bit, so a backend may ignore it; Triton's kernels were given it once, and refused the call."""
    step, arrays = call(batch=4)
    query, key, value, *others = arrays
    query, key, value = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (query, key, value))
    with bijax.lowering_for("sm_80"):
        text = jax.jit(step).trace(query, key, value, *others).lower(lowering_platforms=("cuda",)).as_text()
    assert (launches_in(text) > 0) == HAS_JAX_TRITON
    assert "stablehlo.dot" not in text
    assert "mosaic_gpu" not in text


@pytest.mark.tier("full", fast=("96",))
@pytest.mark.parametrize("size", SPLIT_HEAD_SIZES)
def test_programs_for_hopper_share_splits(size: int) -> None:
    """Rows of all sequences and the number of shared splits come to the first kernel; the second merges splits.

    Both look at the page table.
    """
    step, arrays = call(size=size)
    assert kernels(step, arrays) == [7, 4]


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "changes",
    [{"batch": 1}, {"local_window_size": (9, 0)}, {"alibi_slopes": np.ones(8, np.float32)}],
    ids=["one sequence", "window", "slopes"],
)
def test_what_cannot_be_shared_is_not(changes: dict[str, Any]) -> None:
    step, arrays = call(**changes)
    assert all(count < 7 for count in kernels(step, arrays))
