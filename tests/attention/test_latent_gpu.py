"""Latent attention of DeepSeek's width on a GPU: bits in any batch and under every schedule, and accuracy."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper import latent_attention
from pallas_kernels.attention.schedule.hopper_latents import LatentSchedule
from pallas_kernels.contract import mma_attention_contract
from tests.attention.reference import reference, visible_keys
from tests.goldens import cases

pytestmark = pytest.mark.gpu

BEFORE, TOKENS = 700, 700
"""Tokens in the cache before the queries, and the queries: of two splits."""

attend = jax.jit(functools.partial(bijax.latent_attention, value_size=512, scale=576**-0.5))


@pytest.fixture
def on_hopper() -> None:
    """Skips a test of the kernel for Hopper on other GPUs."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")


def triton() -> contextlib.AbstractContextManager[None]:
    """Makes Triton's kernels serve."""
    return bijax.prefer_backend("jax_triton")


def arrays(heads: int, tokens: int = TOKENS) -> tuple[jax.Array, jax.Array]:
    query = jnp.asarray(cases.array(heads, (2, tokens, heads, 576), jnp.dtype("bfloat16")))
    return query, jnp.asarray(cases.array(1, (2, BEFORE + tokens, 576), jnp.dtype("bfloat16")))


@pytest.mark.parametrize("heads", [16, 128])
def test_bits_of_chunks_tokens_and_batches(heads: int) -> None:
    query, latents = arrays(heads)
    whole = attend(query, latents, query_offset=BEFORE)
    for start, count in ((0, 64), (448, 64), (1, 7), (511, 7), (0, 1), (63, 1), (TOKENS - 1, 1)):
        part = query[:, start : start + count]
        expected = whole[:, start : start + count]
        assert_bits_equal(attend(part, latents, query_offset=BEFORE + start), expected)
        assert_bits_equal(attend(part[1:], latents[1:], query_offset=BEFORE + start), expected[1:])
    many = attend(
        jnp.tile(query[:, -1:], (32, 1, 1, 1)), jnp.tile(latents, (32, 1, 1)), query_offset=BEFORE + TOKENS - 1
    )
    assert_bits_equal(many, jnp.tile(whole[:, -1:], (32, 1, 1, 1)))


def test_values_that_are_not_finite_reach_only_the_rows_that_see_them() -> None:
    query, latents = arrays(16)
    whole = attend(query, latents, query_offset=BEFORE)
    with_nan = attend(query, latents.at[1].set(jnp.nan), query_offset=BEFORE)
    assert_bits_equal(with_nan[:1], whole[:1])
    place = BEFORE + 300
    found = attend(query, latents.at[0, place, 7].set(jnp.inf), query_offset=BEFORE)
    assert_bits_equal(found[:, :300], whole[:, :300])
    assert not jnp.isfinite(found[0, 300:]).all(axis=(1, 2)).any()


LENGTHS = np.array([0, 1, 63, 64, 65, 1023, 1024, 1025, 2100, 2304], np.int32)


def hostile(kind: str, heads: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Three queries of each sequence, and latents with nan after the last one."""
    rng = np.random.default_rng(len(kind))
    query, latents = (rng.standard_normal((len(LENGTHS), n, 576)) for n in (3 * heads, LENGTHS.max()))
    if kind == "wide":
        latents *= 2.0 ** rng.integers(-12, 4, (*latents.shape[:2], 1))
        latents[rng.random(latents.shape) < 0.01] = 1e-39
    for row, length in enumerate(LENGTHS):
        latents[row, length:] = np.nan
        if kind == "not finite" and row % 2:
            latents[row, rng.integers(length), rng.integers(576)] = (np.nan, np.inf, -np.inf)[row % 3]
    return jnp.asarray(query.reshape(len(LENGTHS), 3, heads, 576), dtype), jnp.asarray(latents, dtype)


def kernels() -> tuple[Any, Any]:
    """Latent attention of latents in one piece, and the same in pages."""
    together, paged = (
        jax.jit(functools.partial(f, value_size=512, scale=0.08))
        for f in (bijax.latent_attention, bijax.paged_latent_attention)
    )
    return together, paged


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("heads", "dtype"), [(12, "float16"), (16, "bfloat16"), (128, "bfloat16")])
def test_the_kernel_for_hopper_has_the_bits_of_the_one_in_triton(heads: int, dtype: str) -> None:
    """Of empty, short and long sequences, in pages too."""
    entries, ours, theirs = LENGTHS.max() // 64, kernels(), kernels()
    for kind in ("plain", "wide", "not finite"):
        query, latents = hostile(kind, heads, dtype)
        table = np.random.default_rng(0).permutation(len(LENGTHS) * entries).reshape(-1, entries)
        pages = jnp.zeros((table.size, 64, 576), dtype).at[table].set(latents.reshape(*table.shape, 64, 576))
        # Entries after the last page of a sequence are ignored.
        table = np.where(np.arange(entries) * 64 < LENGTHS[:, None], table, -1).astype(np.int32)
        for count in (1, 3):
            used = np.minimum(LENGTHS, count)
            options = {"query_offset": LENGTHS - used, "query_seq_lengths": used}
            found = []
            for backend, (together, paged) in ((contextlib.nullcontext(), ours), (triton(), theirs)):
                with backend:
                    one = together(query[:, :count], latents, key_value_seq_lengths=LENGTHS, **options)
                    found += [one, paged(query[:, :count], pages, table, LENGTHS, **options)]
            for other in found[1:]:
                assert_bits_equal(other, found[0])
        # A cache whose size is no multiple of 8 is copied.
        numbers = {name: x[:-1] for name, x in options.items()}
        few = ours[0](query[:-1], latents[:-1, :2101], key_value_seq_lengths=LENGTHS[:-1], **numbers)
        assert_bits_equal(few, found[0][:-1])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_schedules_have_the_same_bits(tokens: int) -> None:
    query, latents = arrays(16, 2048)
    limits = jnp.asarray([[BEFORE, tokens, BEFORE + tokens], [2748 - tokens, tokens, 2748]], jnp.int32)
    latents = jnp.pad(latents, ((0, 0), (0, 4), (0, 0)))  # the kernel reads multiples of 8
    options = AttentionOptions(0.05, True, latent_value_size=512)
    call = AttentionCall(query[:, :tokens], latents[:, :, None], None, limits, options)
    expected, *others = (
        jax.jit(
            functools.partial(latent_attention, contract=mma_attention_contract("bfloat16", 576), schedule=schedule)
        )(call)
        for schedule in (
            *(LatentSchedule(whole=whole, ahead=ahead) for whole in (False, True) for ahead in (False, True)),
            *(LatentSchedule(spread=columns) for columns in (64, 128)),
        )
    )
    for other in others:
        assert_bits_equal(other, expected)


def test_against_float64() -> None:
    query, latents = arrays(16, 100)
    found = attend(query, latents, query_offset=BEFORE)
    wide = [np.asarray(x[0], np.float64) for x in (query, latents)]
    seen = visible_keys(100, BEFORE + 100, causal=True, offset=BEFORE)
    expected, _ = reference(wide[0], wide[1][:, None], wide[1][:, None, :512], seen, 576**-0.5)
    error = np.linalg.norm(np.asarray(found[0], np.float64) - expected) / np.linalg.norm(expected)
    assert error < 4e-3
