"""The Triton kernels that route tokens and copy rows, under the interpreter, against XLA's programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.expert_rows import pallas_triton as expert_rows_triton
from pallas_kernels.expert_rows import portable as expert_rows
from pallas_kernels.pick import cpu as pick_cpu
from pallas_kernels.pick import pallas_triton as pick_triton
from pallas_kernels.pick import portable as pick
from pallas_kernels.topk import cpu as topk_cpu
from pallas_kernels.topk import pallas_triton as topk_triton
from pallas_kernels.topk import portable as topk
from tests.moe.routing_cases import COUNTS, PLACES, SORTS, numbers, rows_and_places, scores


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_bits_equal(a, b)


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_largest(dtype: str) -> None:
    x = scores(4, 37, dtype)
    expected = topk.largest(x, number=9)
    assert_same(topk_triton.largest(x, number=9, interpret=True), expected)
    assert_same(topk_cpu.largest(x, number=9), expected)
    assert not topk_triton.largest.serves(x, number=65)


@pytest.mark.tier("full", fast=("all experts",))
@pytest.mark.parametrize("name", SORTS)
def test_sort_by_expert(name: str) -> None:
    size, options = SORTS[name]
    given = numbers(size, -2, options["end"] + 3)
    found = expert_rows_triton.sort_by_expert(given, **options, interpret=True)
    assert_same(found, expert_rows.sort_by_expert(given, **options))


@pytest.mark.tier("full", fast=("some",))
@pytest.mark.parametrize("name", COUNTS)
def test_rows_by_count(name: str) -> None:
    count, rows = COUNTS[name]
    given = jnp.array(count, jnp.int32)
    found = expert_rows_triton.rows_by_count(given, rows=rows, interpret=True)
    assert_same(found, expert_rows.rows_by_count(given, rows=rows))
    assert bool(found[1]) == (name == "some")


@pytest.mark.tier("full", fast=("after the last",))
@pytest.mark.parametrize("name", PLACES)
def test_rows_of_tokens(name: str) -> None:
    offset, places = PLACES[name]
    given = jnp.array(offset, jnp.int32)
    found = expert_rows_triton.rows_of_tokens(given, places=places, interpret=True)
    assert_bits_equal(found, expert_rows.rows_of_tokens(given, places=places))
    assert ((found == -2).sum() == {"some": 0, "twice": 1, "after the last": 6}[name]).item()


@pytest.mark.tier("full", fast=("int8-64",))
@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 96), ("int8", 64), ("float32", 32)])
def test_pick_rows(dtype: str, columns: int) -> None:
    x, place = rows_and_places(dtype, columns)
    assert_bits_equal(pick_triton.pick_rows(x, place, interpret=True), pick.pick_rows(x, place))
    assert_bits_equal(jax.jit(pick_cpu.pick_rows)(x, place), pick.pick_rows(x, place))
    order = jnp.array([3, 1, 8, 0, 2, 7, 5, 4, 6], jnp.int32)[:, None]
    assert_bits_equal(pick_triton.pick_rows(x, place, order, interpret=True), pick.pick_rows(x, place, order))
    assert not pick_triton.pick_rows.serves(x[:, :31], place)
