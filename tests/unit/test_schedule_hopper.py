"""Hopper schedules: what a table entry may say, and that every choice fits the chip."""

import json
from pathlib import Path

import pytest

from pallas_kernels.schedule import hopper
from pallas_kernels.schedule.hopper import SHARED_BYTES, SMS, MatmulSchedule, candidates, matmul_schedule

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
    assert matmul_schedule(m, k, n, out_itemsize=out_itemsize) in found.values()


def test_a_tuned_shape_gets_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    name, slowest = list(candidates(512, 4096, 4096).items())[-1]
    assert matmul_schedule(512, 4096, 4096) != slowest
    monkeypatch.setattr(hopper, "_table", lambda: {(4096, 4096, False): {512: name}})
    assert matmul_schedule(512, 4096, 4096) == matmul_schedule(300, 4096, 4096) == slowest
    assert matmul_schedule(1024, 4096, 4096) != slowest


def test_the_table_names_candidates() -> None:
    for entry in json.loads(Path(hopper.__file__).with_name("hopper_matmul.json").read_text())["shapes"]:
        for rows, name in entry["rows"].items():
            assert name in candidates(int(rows), entry["k"], entry["n"], transpose_w=entry["transpose_w"])


def test_more_tiles_than_multiprocessors_make_a_persistent_grid() -> None:
    assert matmul_schedule(8192, 8192, 8192).clusters == SMS


@pytest.mark.parametrize(
    "change",
    [
        {"tile_rows": 96},
        {"tile_columns": 12},
        {"tile_columns": 264},
        {"k_step": 16},
        {"stages": 1},
        {"warpgroups": 4},
        {"split": "k"},
        {"cluster_rows": 3},
        {"cluster_rows": 2, "cluster_columns": 2},
        {"clusters": -1},
        {"group": 0},
    ],
)
def test_impossible_schedules_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="got MatmulSchedule"):
        MatmulSchedule(**{"swap": False, "tile_rows": 64, "tile_columns": 64, "k_step": 64, "stages": 3, **change})
