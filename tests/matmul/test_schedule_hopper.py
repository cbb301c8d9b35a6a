"""Hopper schedules: what a table entry may say, and that every choice fits the chip."""

import json
from pathlib import Path

import pytest

from pallas_kernels.matmul.schedule.hopper import matmul
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule, chain_schedule
from pallas_kernels.matmul.schedule.hopper.matmul import candidates, matmul_schedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

SHAPES = [
    (m, k, n)
    for m in (1, 7, 8, 9, 64, 65, 256, 300, 8192)
    for k, n in ((64, 16), (576, 49152), (8192, 1280), (4096, 4096))
]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("out_itemsize", [2, 4])
def test_candidates_fit(m: int, k: int, n: int, out_itemsize: int) -> None:
    found = candidates(m, k, n, out_itemsize=out_itemsize)
    assert found
    for schedule in found.values():
        assert schedule.shared_bytes(2, out_itemsize) <= SHARED_BYTES
    assert matmul_schedule(m, k, n, out_itemsize=out_itemsize).shared_bytes(2, out_itemsize) <= SHARED_BYTES


def test_a_tuned_shape_gets_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    name, slowest = list(candidates(512, 4096, 4096).items())[-1]
    assert matmul_schedule(512, 4096, 4096) != slowest
    monkeypatch.setattr(matmul, "_table", lambda: {(4096, 4096, False): {512: name}})
    assert matmul_schedule(512, 4096, 4096) == matmul_schedule(300, 4096, 4096) == slowest
    assert matmul_schedule(1024, 4096, 4096) != slowest


def test_the_table_names_candidates() -> None:
    for entry in json.loads(Path(matmul.__file__).with_suffix(".json").read_text())["shapes"]:
        for rows, name in entry["rows"].items():
            assert name in candidates(int(rows), entry["k"], entry["n"], transpose_w=entry["transpose_w"])


# Shapes whose schedules were timed on an H200: the fastest, or one within 2 % of it, has to be among the first six.
TIMED = {
    (1, 8192, 1280): "weights 64x8 k192",
    (64, 8192, 1280): "weights 64x16 k192",
    (128, 8192, 1280): "weights 64x32 k192",
    (512, 8192, 1280): "weights 64x88 k128",
    (1024, 8192, 1280): "weights 64x176 k64",
    (2048, 8192, 1280): "weights 64x160 k64 warpgroups2",
    (8192, 8192, 1280): "weights 128x160 k64 warpgroups2",
    (1, 576, 49152): "weights 64x8 k192 blocks2",
    (8192, 576, 49152): "rows 128x192 k64 warpgroups2 in turn",
    (8192, 576, 1536): "rows 128x192 k64 warpgroups2 in turn",
    (256, 2048, 6144): "rows 64x192 k64",
    (4096, 4096, 4096): "rows 64x256 k64 warpgroups2",
}


@pytest.mark.parametrize("shape", TIMED)
def test_the_fastest_is_among_the_first_six(shape: tuple[int, int, int]) -> None:
    assert TIMED[shape] in list(candidates(*shape))[:6]


def test_more_tiles_than_multiprocessors_make_a_persistent_grid() -> None:
    assert matmul_schedule(8192, 8192, 8192).blocks == SMS


@pytest.mark.parametrize(
    "change",
    [
        {"tile_rows": 96},
        {"tile_columns": 12},
        {"tile_columns": 264},
        {"k_step": 48},
        {"stages": 1},
        {"warpgroups": 4},
        {"split": "k"},
        {"split": "columns"},
        {"blocks": -1},
        {"group": 0},
        {"out_buffers": 0},
    ],
)
def test_impossible_schedules_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="got MatmulSchedule"):
        MatmulSchedule(**{"swap": False, "tile_rows": 64, "tile_columns": 64, "k_step": 64, "stages": 3, **change})


@pytest.mark.parametrize("itemsize", [2, 4])
def test_few_rows_of_few_columns_are_read_into_registers(itemsize: int) -> None:
    found = [chain_schedule(m, k, n, itemsize=itemsize) for m in (1, 8, 16) for k, n in ((4096, 1024), (8192, 1280))]
    of_16_bits = (chain_schedule(m, 8192, 1280) for m in (32, 64))
    for schedule in (*found, *(of_16_bits if itemsize == 2 else ())):
        assert schedule is not None
        assert schedule.fits(itemsize, transpose_w=False)
        assert schedule.shared_bytes(itemsize) <= SHARED_BYTES
    for m in (1, 16, 32, 64) if itemsize == 4 else (1, 16, 32):
        schedule = chain_schedule(m, 4096, 1024, itemsize=itemsize, transpose_w=True)
        assert schedule is not None
        assert schedule.fits(itemsize, transpose_w=True)
        assert schedule.shared_bytes(itemsize) <= SHARED_BYTES
    others = ((65, 8192, 1280), (8, 2048, 2048), (8, 4096, 512), (8, 4096, 14336), (4096, 4096, 4096))
    assert chain_schedule(8, 4100, 1024, itemsize=itemsize, transpose_w=True) is None  # K is no whole swizzled rows
    for stored in ({}, {"transpose_w": True}):
        assert [chain_schedule(*shape, itemsize=itemsize, **stored) for shape in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((24, 8, 128, 3), "columns must be one of"),
        ((32, 12, 128, 3), "rows must be a multiple of 8"),
        ((32, 8, 40, 3), "k_step must be"),
        ((32, 8, 128, 1), "stages at least 2"),
    ],
)
def test_chain_schedules_that_the_kernel_cannot_run_are_refused(
    change: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ChainSchedule(*change)
