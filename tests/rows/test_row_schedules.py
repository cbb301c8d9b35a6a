"""The engine of the row kernels for Hopper: every way to feed a row gives the bits of the contract."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.parts.hopper.row_engine import run_rows
from pallas_kernels.schedule.hopper.rows import RowSchedule, row_schedule, row_vector
from tests.mosaic import Races, interpreter
from tests.rows import row_emulation as emulation

pytestmark = pytest.mark.usefixtures("hopper")

# A block of 2048 lanes and a ragged end. Under the interpreter each warpgroup wants a thread of the machine's own.
COLUMNS = 2112
SHORT = 200  # columns, for a warp
SCHEDULES = {
    "memory": RowSchedule(1, 2, unroll=1),
    "memory, held, one row a block": RowSchedule(2, 3, hold=True, preload=True),
    "ring": RowSchedule(2, 1, COLUMNS, 2),
    "ring, held": RowSchedule(1, 1, COLUMNS, 1, hold=True),
    "ring of pieces": RowSchedule(1, 2, 2048, 3, preload=True),
    "ring shorter than a row": RowSchedule(2, 1, 2048, 1),
    "cluster": RowSchedule(1, 1, hold=True, cluster=2),
    "a row a warp": RowSchedule(1, 2, hold=True, preload=True, rows_per_warp=1),
    "two rows a warp": RowSchedule(1, 1, hold=True, rows_per_warp=2),
    "four rows a warp, by eight threads": RowSchedule(1, 1, hold=True, rows_per_warp=1, threads=8, vector=8),
    "rows asked for ahead": RowSchedule(2, 3, unroll=1, ahead=2),
}


def columns_for(schedule: RowSchedule) -> int:
    return SHORT if schedule.rows_per_warp else COLUMNS if schedule.members < 8 else 8192


def run(x: Any, w: Any, schedule: RowSchedule, interpret: Any) -> tuple[jax.Array, ...]:
    """One fold, then two in one pass, then a result: everything that a program may do."""

    def program(row: Any) -> None:
        most = row.fold(lambda x: x, combine="max", unit=-jnp.inf)
        total, product = row.fold(
            lambda x, w: (x - most, row.product(x, w)), combine=("add", "add"), unit=0.0, vectors=(0,)
        )
        row.put(0, total)
        row.put(1, product)
        row.emit(lambda x, w: (row.product(x, total) + w,))

    return run_rows(program, [x], [w], [x.dtype], numbers=2, interpret=interpret, schedule=schedule)


def run_sum(x: Any, schedule: RowSchedule, interpret: Any) -> jax.Array:
    def program(row: Any) -> None:
        row.put(0, row.fold(lambda x: x))

    return run_rows(program, [x], numbers=1, interpret=interpret, schedule=schedule)[0]


@pytest.mark.tier("full", fast=("memory, held, one row a block",))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_bits_of_the_contract(name: str, races: Races) -> None:
    columns = columns_for(SCHEDULES[name])
    x = hostile_rows(0, (3, columns), "bfloat16")["normal"]
    w = hostile_rows(1, (columns,), "bfloat16")["normal"]
    interpret = interpreter()
    y, total, product = run(x, w, SCHEDULES[name], interpret)
    wide, weights = x.astype(np.float32), w.astype(np.float32)
    sums = emulation.add_row(wide - wide.max(1, keepdims=True))
    assert_bits_equal(total, sums)
    assert_bits_equal(product, emulation.add_row(wide * weights))
    assert_bits_equal(y, (wide * sums + weights).astype(x.dtype))
    assert_bits_equal(run_sum(x, SCHEDULES[name], interpret), emulation.add_row(wide))
    assert not races()


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES.values(), RowSchedule(8, 2, hold=True), RowSchedule(4, 2, hold=True, cluster=2)]
)
def test_every_schedule_lowers_for_a_gpu(schedule: RowSchedule) -> None:
    columns = columns_for(schedule)
    x, w = jax.ShapeDtypeStruct((3, columns), jnp.bfloat16), jax.ShapeDtypeStruct((columns,), jnp.bfloat16)
    program = jax.jit(lambda x, w: run(x, w, schedule, False)).trace(x, w)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("columns", "schedule"),
    [
        (8192, RowSchedule(1, 4, 8192, 1, spread=True)),
        (8192, RowSchedule(2, 4, hold=True, spread=True)),
        (4096, RowSchedule(1, 4, hold=True, preload=True, spread=True)),
        (COLUMNS, RowSchedule(1, 4, hold=True, spread=True)),
    ],
)
def test_spread_strips_lower_for_a_gpu(columns: int, schedule: RowSchedule) -> None:
    x = jax.ShapeDtypeStruct((4, columns), jnp.bfloat16)
    program = jax.jit(lambda x: run_sum(x, schedule, False)).trace(x)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


def test_strips_are_spread_where_rows_wait_for_their_sums() -> None:
    def spread(rows: int, columns: int, **options: Any) -> bool:
        return row_schedule(rows, columns, row_contract().lanes(columns), (2,), (2,), 1, **options).spread

    layer_norm: dict[str, Any] = {"passes": 3, "plain": True, "sums": 2}
    assert spread(512, 8192, **layer_norm)
    assert spread(4096, 2048, **layer_norm)
    assert spread(8, 4096, sums=1)
    assert not spread(8, 4096)  # a maximum
    assert not spread(4096, 4096, sums=1)
    assert not spread(4096, 576, **layer_norm)


def test_norms_of_long_rows_ask_for_rows_ahead_and_short_rows_have_few_threads() -> None:
    def schedule(rows: int, columns: int, itemsizes: tuple[int, ...] = (2,), vectors: int = 1) -> RowSchedule:
        lanes = row_contract().lanes(columns)
        return row_schedule(rows, columns, lanes, itemsizes, itemsizes[:1], vectors, 2, sums=1)

    assert schedule(4096, 4096).ahead * 4096 * 2 == schedule(16384, 2048).ahead * 2048 * 2 == 528 * 8192
    assert schedule(512, 128256).ahead == 16
    assert not schedule(1024, 4096).ahead  # few
    assert not schedule(4096, 4096, vectors=0).ahead  # not a norm
    assert not schedule(4096, 32000, (4,)).ahead  # held in registers
    assert [schedule(rows, 128).threads for rows in (64, 1024, 16384)] == [32, 8, 4]
    assert [schedule(16384, columns, (4,)).threads for columns in (128, 192)] == [8, 32]
    assert schedule(16384, 192).threads == 8
    assert schedule(16384, 192, vectors=0).threads == 32
    total = row_schedule(512, 8192, 8192, (2,), passes=1, sums=1)
    assert (total.spread, total.team) == (True, 4)


def test_spread_strips_are_for_sums_of_one_block() -> None:
    x, w = jnp.zeros((2, 8192), jnp.bfloat16), jnp.zeros(8192, jnp.bfloat16)
    for schedule in (RowSchedule(1, 2, cluster=2, spread=True), RowSchedule(1, 2, preload=True, spread=True)):
        with pytest.raises(ValueError, match="do not allow"):
            run_sum(x, schedule, False)
    with pytest.raises(ValueError, match="for sums only, got max"):
        jax.jit(lambda x, w: run(x, w, RowSchedule(1, 2, hold=True, spread=True), False)).trace(x, w).lower(
            lowering_platforms=("cuda",)
        )


def test_a_row_has_lanes_for_all_that_share_it() -> None:
    x = jnp.zeros((2, 2048), jnp.float32)
    with pytest.raises(ValueError, match="for each of 2 rows"):
        run_sum(x, RowSchedule(1, 1, ahead=1), False)
    with pytest.raises(ValueError, match="do not allow"):
        run_sum(x[:, :128], RowSchedule(1, 2, hold=True, rows_per_warp=1, threads=32, vector=8), False)
    with pytest.raises(ValueError, match="do not allow"):
        run_sum(x, RowSchedule(8, 2), False)
    with pytest.raises(ValueError, match="do not allow"):
        run_sum(x, RowSchedule(1, 1, hold=True, rows_per_warp=1), False)
    with pytest.raises(ValueError, match="blocks for 9 rows"):
        run_sum(jnp.zeros((9, SHORT), jnp.float32), RowSchedule(1, 1, hold=True, rows_per_warp=2), False)


@pytest.mark.parametrize("columns", [128, 576, 1024, 2048, 4096, 8192, 32000, 128256, 262144])
@pytest.mark.parametrize("itemsizes", [(2,), (4,), (2, 4), (4, 4, 4)])
def test_the_rule_fits_the_machine(columns: int, itemsizes: tuple[int, ...]) -> None:
    lanes = row_contract().lanes(columns)
    for rows in (1, 8, 64, 512, 4096, 100_000):
        schedule = row_schedule(rows, columns, lanes, itemsizes, itemsizes[:1], 1)
        assert schedule.strips(lanes, schedule.vector or row_vector(lanes, itemsizes)) >= 1
        assert not schedule.rows_per_warp or schedule.blocks * schedule.rows_per_block >= rows
        assert schedule.stages * schedule.stage * sum(itemsizes) <= 232_448
    unaligned = columns + 8
    assert not row_schedule(4096, unaligned, row_contract().lanes(unaligned), itemsizes, itemsizes[:1], 1).stages
