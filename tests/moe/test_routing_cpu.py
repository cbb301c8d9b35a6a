"""The kernels of a CPU that route tokens, against XLA's programs for any platform."""

import jax
import jax.numpy as jnp
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.parts.no_row import NO_ROW, UNREAD
from pallas_kernels.pick import cpu as pick_cpu
from pallas_kernels.pick import portable as pick
from pallas_kernels.topk import cpu as topk_cpu
from pallas_kernels.topk import portable as topk
from tests.moe.routing_cases import rows_and_places, scores


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_largest(dtype: str) -> None:
    x = scores(4, 37, dtype)
    portable = jax.jit(lambda x: topk.largest(x, number=9))
    for found, expected in zip(topk_cpu.largest(x, number=9), portable(x), strict=True):
        assert_bits_equal(found, expected)


@pytest.mark.tier("full", fast=("int8-64",))
@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 96), ("int8", 64), ("float32", 32)])
def test_pick_rows(dtype: str, columns: int) -> None:
    x, place = rows_and_places(dtype, columns)
    assert_bits_equal(jax.jit(pick_cpu.pick_rows)(x, place), pick.pick_rows(x, place))
    unread = jnp.where(place == NO_ROW, UNREAD, place)  # zeros too where rows are not left unwritten
    for backend in (pick_cpu, pick):
        assert_bits_equal(jax.jit(backend.pick_rows)(x, unread), pick.pick_rows(x, place))
