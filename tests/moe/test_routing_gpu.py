"""The kernels that route tokens and copy rows, on a GPU: integers and copies, the same as by XLA's programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.core.architecture import target_for
from bijax.ops.moe.select_experts import select_experts
from bijax.testing import assert_bits_equal
from pallas_kernels.expert_rows import portable as expert_rows
from pallas_kernels.parts.no_row import UNREAD
from pallas_kernels.pick import portable as pick
from pallas_kernels.topk import portable as topk
from tests.jax_triton.packages import launches_in
from tests.moe.routing_cases import COUNTS, PLACES, SORTS, SUMS, numbers, rows_and_places, rows_to_add, scores

pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton")
from pallas_kernels.expert_rows.jax_triton import launch as expert_rows_triton  # noqa: E402
from pallas_kernels.pick.jax_triton import launch as pick_triton  # noqa: E402
from pallas_kernels.topk.jax_triton import launch as topk_triton  # noqa: E402


def assert_same(kernel: Any, portable: Any, *arrays: Any, **options: Any) -> None:
    found = jax.tree.leaves(jax.jit(functools.partial(kernel, target=target_for("cuda"), **options))(*arrays))
    expected = jax.tree.leaves(jax.jit(functools.partial(portable, **options))(*arrays))
    for a, b in zip(found, expected, strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns", "number"), [(5, 256, 8), (700, 128, 8), (3, 1500, 64), (4, 37, 9)])
def test_largest(dtype: str, rows: int, columns: int, number: int) -> None:
    assert_same(topk_triton.largest, topk.largest, scores(rows, columns, dtype), number=number)


def test_rows_of_experts() -> None:
    for size, options in (*SORTS.values(), (4096, {"first": 0, "end": 256, "allocated": 4096})):
        given = numbers(size, -2, options["end"] + 3)
        assert_same(expert_rows_triton.sort_by_expert, expert_rows.sort_by_expert, given, **options)
    for dtype, columns, experts, places in (
        ("bfloat16", 2048, 512, 10),
        ("float32", 96, 7, 200),
        ("float16", 7168, 1, 1),
    ):
        x, _ = rows_and_places(dtype, columns)
        given = numbers(5 * places, -2, experts + 3)
        options = {"experts": experts, "topk": places}
        assert_same(expert_rows_triton.spread_to_experts, expert_rows.spread_to_experts, x, given, **options)
    spread = np.bincount(numbers(65536, 0, 256), minlength=256).tolist()
    for count, rows in (*COUNTS.values(), (spread, 65536)):
        given = jnp.array(count, jnp.int32)
        assert_same(expert_rows_triton.rows_by_count, expert_rows.rows_by_count, given, rows=rows)
    shuffled = np.random.default_rng(0).permutation(4096).tolist()
    for offset, places in (*PLACES.values(), (shuffled, 4096)):
        given = jnp.array(offset, jnp.int32)
        assert_same(expert_rows_triton.rows_of_tokens, expert_rows.rows_of_tokens, given, places=places)


@pytest.mark.parametrize(
    "case", [*SUMS, ("bfloat16", 64, 8, 512, 7168, "some"), ("bfloat16", 512, 8, 4096, 7168, "some")]
)
def test_sums_of_expert_rows(case: tuple[Any, ...]) -> None:
    assert_same(
        expert_rows_triton.add_expert_rows, expert_rows.add_expert_rows_on_gpu, *rows_to_add(*case), dtype=case[0]
    )


@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 7168), ("bfloat16", 768), ("int8", 64), ("float32", 32)])
def test_pick_rows(dtype: str, columns: int) -> None:
    x, place = rows_and_places(dtype, columns)
    assert_same(pick_triton.pick_rows, pick.pick_rows, x, place)
    order = jnp.asarray(np.random.default_rng(0).permutation(place.shape[0])[:, None], jnp.int32)
    assert_same(pick_triton.pick_rows, pick.pick_rows, x, place, order)
    found = jax.jit(functools.partial(pick_triton.pick_rows, target=target_for("cuda")))(x, place.at[4].set(UNREAD))
    assert_bits_equal(*(np.delete(np.asarray(rows), 4, axis=0) for rows in (found, pick.pick_rows(x, place))))


def test_rows_of_one_token_together() -> None:
    x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)  # more than what stays in the cache
    selected = jax.lax.top_k(jax.random.normal(jax.random.key(1), (4096, 16)), 4)[1]
    rows, _, offset = jax.jit(functools.partial(bijax.moe_scatter, expert_end_idx=12))(x, selected)
    expected = jnp.where((offset >= 0)[:, None], x[offset // 4], 0)
    assert_bits_equal(rows, expected.astype(x.dtype))


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(1, 16, 10), (8, 512, 10), (700, 128, 8), (33, 1000, 6)])
def test_selection_in_one_kernel(tokens: int, experts: int, topk: int) -> None:
    """The bits are those of softmax, the largest probabilities and their sum, with its gradient and without."""
    logits = scores(tokens, experts, "float32").at[0].set(jnp.arange(experts) % 7 / 8)  # with ties

    def pieces(x: jax.Array) -> Any:
        y = bijax.softmax(x)
        selected = bijax.moe_softmax_topk(y, topk)[0]
        chosen = jnp.take_along_axis(y, selected, axis=-1)
        return selected, chosen, bijax.sum(chosen, axis=-1)[:, None]

    one = jax.jit(lambda x: select_experts(x, topk))
    assert launches_in(one.trace(logits).lower().as_text()) == 1
    expected = jax.jit(pieces)(logits)
    for found in (one(logits), jax.jit(lambda x: jax.vjp(lambda x: select_experts(x, topk), x)[0])(logits)):
        for a, b in zip(found, expected, strict=True):
            assert_bits_equal(a, b)
