"""The softmax family for Hopper on a CPU: kernels under the interpreter, programs that a GPU would get, schedules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import OnlineRowContract, online_row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.schedule.hopper.softmax import SHARED_BYTES, SMS, OnlineSchedule, online_schedule, segments_of
from pallas_kernels.softmax import hopper
from tests.arrays import on_device
from tests.mosaic import Races, interpreter
from tests.rows.softmax_kernel_cases import forms, hostile, schedules
from tests.tiers import full_only, tiered

pytestmark = pytest.mark.usefixtures("hopper")

NAMES = tuple(
    name + form for name in ("softmax", "log_softmax", "logsumexp", "cross_entropy") for form in ("", "_gradient")
)


# Segments of 1024 columns and of 4096, with a last block that is not whole.
@pytest.mark.tier("full")
@pytest.mark.parametrize(("columns", "every"), [(2144, False), full_only(2144, True), full_only(8800, True)])
def test_every_schedule_gives_the_same_bits(columns: int, every: bool, races: Races) -> None:
    x = on_device(np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32) * 3)
    first, *others = schedules(columns, 4)
    reference = log_softmax(x, first)
    np.testing.assert_allclose(reference[0], jax.nn.log_softmax(x), rtol=1e-5, atol=1e-5)
    for schedule in others if every else others[-1:]:
        assert_bits_equal(log_softmax(x, schedule), reference, err_msg=str(schedule))
    assert not races()


@pytest.mark.parametrize("name", tiered(NAMES, fast=["cross_entropy"]))
def test_interpreted_kernels_agree_with_the_portable_form(name: str, races: Races) -> None:
    """In value, and in what is nan or infinite: the sums are taken in another order."""
    found = forms(*hostile(300, "float32"))
    assert tuple(found) == NAMES
    kernel, portable = found[name]
    found, expected = kernel(interpret=interpreter()), jax.jit(portable)()
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    assert not races()


@pytest.mark.parametrize("shape", [(2, 1), (2, 77), (0, 300)])
def test_edge_sizes(shape: tuple[int, int]) -> None:
    x = on_device(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    y, m, log_sum = hopper.log_softmax(x, contract=online_row_contract(shape[1]), interpret=interpreter())
    np.testing.assert_allclose(np.asarray(y, np.float32), jax.nn.log_softmax(x.astype(jnp.float32)), atol=2e-2)
    assert m.shape == log_sum.shape == (shape[0], 1)


def test_rows_of_nothing_are_left_to_the_portable_form() -> None:
    x = jnp.zeros((2, 0), jnp.bfloat16)
    assert not hopper.log_softmax.serves(x)
    with pytest.raises(UnsupportedError, match=r"expected rows of at least one element, got bfloat16\[2, 0\]"):
        hopper.log_softmax(x, contract=online_row_contract(0))
    with bijax.lowering_for("sm_90"):
        program = jax.jit(lambda x: bijax.log_softmax(x)).trace(x).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in program.as_text()


@pytest.mark.tier(
    "full",
    fast=(
        "576-bfloat16-softmax",
        "576-bfloat16-log_softmax",
        "576-bfloat16-log_softmax_gradient",
        "576-bfloat16-logsumexp",
        "321-float32-log_softmax_gradient",
    ),
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("columns", "dtype"), [(576, "bfloat16"), (321, "float32")])
def test_programs_for_a_gpu_lower_with_a_kernel(name: str, columns: int, dtype: str) -> None:
    if columns == 321 and name in ("softmax_gradient", "log_softmax_gradient"):
        pytest.skip("the row engine takes no rows that the copy engine cannot address")
    assert "mosaic_gpu" in lowered(forms(*hostile(columns, dtype))[name][0])


def test_long_rows_lower_for_a_gpu() -> None:
    x = jnp.zeros((200, 32000), jnp.float32)
    program = jax.jit(lambda x: hopper.logsumexp(x, contract=online_row_contract(32000))).trace(x)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


def lowered(kernel: Callable[[], Any]) -> str:
    return jax.jit(lambda: kernel()).trace().lower(lowering_platforms=("cuda",)).as_text()


def log_softmax(x: jax.Array, schedule: OnlineSchedule) -> Any:
    contract = online_row_contract(x.shape[1])
    return hopper.log_softmax(x, contract=contract, interpret=interpreter(), schedule=schedule)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "columns", [1, 8, 36, 64, 77, 128, 321, 576, 2048, 4096, 8192, 8200, 32000, 50257, 128256, 262144]
)
def test_schedules_fit_the_machine(columns: int, itemsize: int) -> None:
    segments = segments_of(columns, online_row_contract(columns).segment)
    for rows in (1, 8, 64, 512, 4096, 16384):
        schedule = online_schedule(rows, columns, itemsize)
        if schedule.form == "registers":
            assert segments <= 8
        elif schedule.form == "warps":
            assert schedule.threads in (1, 2, 4, 8, 16, 32)
            assert columns % schedule.vector == 0
            assert schedule.vector * schedule.threads <= 128
        elif schedule.form == "ring":
            assert columns * itemsize % 16 == 0
            each = schedule.blocks // SMS
            stage = min(-(-columns // 128) * 128, 4096 + 128) * itemsize
            used = schedule.stages * stage + 1024 * (segments + schedule.warpgroups) + 16 * (schedule.stages + 2)
            assert each * (used + 1024) <= SHARED_BYTES + 1024
            assert schedule.stages >= max(2, schedule.warpgroups)


@pytest.mark.parametrize(("columns", "dtype"), [(16, "bfloat16"), (64, "bfloat16"), (60, "float16"), (128, "float32")])
def test_short_rows_lower_for_a_gpu(columns: int, dtype: str) -> None:
    x = jnp.zeros((1000, columns), dtype)
    assert "mosaic_gpu" in lowered(lambda: hopper.log_softmax(x, contract=online_row_contract(columns)))
    too_wide = OnlineSchedule("warps", vector=8, threads=32)
    with pytest.raises(ValueError, match="do not allow"):
        lowered(lambda: hopper.log_softmax(x, contract=online_row_contract(columns), schedule=too_wide))


def test_the_contract_states_its_numbers() -> None:
    assert online_row_contract(8192).id == "online-rows/v1/f32-lanes128-chunk8-segment1024-tree"
    assert online_row_contract(8193).id == "online-rows/v1/f32-lanes128-chunk8-segment4096-tree"
    with pytest.raises(ValueError, match="lanes must be a power of two, got 96"):
        OnlineRowContract(lanes=96)
    with pytest.raises(ValueError, match="multiple of the 1024 columns of a chunk, got 1000"):
        OnlineRowContract(segment=1000)


def test_a_ring_that_does_not_fit_its_warpgroups() -> None:
    with pytest.raises(ValueError, match="expected stages a multiple of warpgroups"):
        log_softmax(jnp.ones((2, 9000)), OnlineSchedule("ring", 4096, 3, 2, warpgroups=2))
