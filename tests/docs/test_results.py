"""Files of results are in the form that `benchmarks.record` describes, and README and docs show what is in them."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.tables.blocks import BLOCKS, FILES, ROOT, filled, names
from tests.fuzz import run
from tests.fuzz.run import overlapping, summarised

FILES_OF_RESULTS = sorted(record.RESULTS.glob("*.json"))
HEAD: dict[str, Any] = {"device": "CPU", "versions": {"jax": "1"}, "date": "2026-01-01", "clean": True}


def cell(m: int, ours_us: float) -> dict[str, Any]:
    return {"m": m, "k": 8, "n": 8, "ours_us": ours_us, "xla_us": 2.0, "ratio": 2.0 / ours_us}


@pytest.mark.parametrize("path", FILES_OF_RESULTS, ids=[path.stem for path in FILES_OF_RESULTS])
def test_form(path: Path) -> None:
    assert list(record.faults(path)) == []


@pytest.mark.parametrize("path", FILES_OF_RESULTS, ids=[path.stem for path in FILES_OF_RESULTS])
def test_ratio_is_the_other_time_over_ours(path: Path) -> None:
    for one in record.cells(record.read(path)):
        if {"ratio", "ours_us", "xla_us"} <= set(one):
            # Both times are rounded to 0.01 µs, and in whole models to 0.1 µs.
            assert one["ratio"] == pytest.approx(one["xla_us"] / one["ours_us"], rel=0.01), one


@pytest.mark.parametrize("name", FILES)
def test_pages_show_the_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert names(text), f"{name} has no block that benchmarks.tables makes"
    assert filled(text) == text, "run: python -m benchmarks.tables"


def test_every_block_is_on_a_page() -> None:
    shown = {block for name in FILES for block in names((ROOT / name).read_text(encoding="utf-8"))}
    assert shown == set(BLOCKS)


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    begin = text.index("<!-- made by benchmarks.tables: cost -->")
    changed, number = re.subn(r"\| 1\.\d\d \|", "| 9.99 |", text[begin:], count=1)
    assert number == 1
    assert filled(changed) != changed


def test_a_run_adds_to_its_file() -> None:
    first = record.part([cell(1, 1.0), cell(2, 1.0)], **HEAD, commit="aaa")
    later = record.part([cell(2, 0.5)], **HEAD, commit="bbb")
    result = record.merged("matmul_bf16", [later], record.merged("matmul_bf16", [first]))
    assert [(one["commit"], [c["m"] for c in one["cells"]]) for one in result["parts"]] == [("aaa", [1]), ("bbb", [2])]
    assert (result["geomean"], result["worst"]) == (round(8**0.5, 3), 2.0)
    # Another call of the same run adds to its part and replaces what is measured again.
    more = record.part([cell(3, 1.0), cell(2, 1.0)], **HEAD, commit="bbb")
    result = record.merged("matmul_bf16", [more], result)
    assert [[c["m"] for c in one["cells"]] for one in result["parts"]] == [[1], [2, 3]]
    assert result["geomean"] == 2.0
    # A part is removed when all its cells are measured again.
    again = record.part([cell(1, 1.0)], **HEAD, commit="bbb")
    assert [one["commit"] for one in record.merged("matmul_bf16", [again], result)["parts"]] == ["bbb"]
    with pytest.raises(ValueError, match="expected a file of rows"):
        record.merged("rows", [again], result)


def test_files_of_another_machine_are_merged(tmp_path: Path) -> None:
    for folder, commit in (("here", "aaa"), ("there", "bbb")):
        part = record.part([cell(1 if folder == "here" else 2, 1.0)], **HEAD, commit=commit)
        record.write(record.merged("matmul_bf16", [part]), tmp_path / folder / "matmul_bf16_h100.json")
    target = record.add(tmp_path / "there" / "matmul_bf16_h100.json", tmp_path / "here")
    assert [one["commit"] for one in record.read(target)["parts"]] == ["aaa", "bbb"]
    assert list(record.faults(target)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "aaa-dirty"}, "write `clean`: false"),
        ({"clean": False}, "does not say `rerun`"),
        ({"cells": [cell(1, 1.0), cell(1, 2.0)]}, "two cells"),
    ],
)
def test_faults_are_found(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    result = record.merged("matmul_bf16", [record.part([cell(1, 1.0)], **HEAD, commit="aaa")])
    path = tmp_path / "matmul_bf16_cpu.json"
    record.write(result, path)
    assert list(record.faults(path)) == []
    wrong = copy.deepcopy(result)
    wrong["parts"][0] |= change
    path.write_text(json.dumps(wrong))
    assert any(message in fault for fault in record.faults(path))
    path.rename(tmp_path / "rows_cpu.json")
    assert any("is of the benchmark matmul_bf16" in fault for fault in record.faults(tmp_path / "rows_cpu.json"))


def test_random_programs_are_not_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "programs_cpu.json"
    assert overlapping(path, range(300), None) == []
    kind: dict[str, Any] = {"seed": 1, "kernels": False, "guests": False}
    found = [{**kind, "differing_elements": {"3": 1}}, {**kind, "differing_elements": {}, "error": "TypeError: x"}]
    one = summarised(found, range(10, 12), "plain", 1.4, 2)
    assert (one["programs"], one["differing"], one["failed"], one["seconds"]) == (2, 1, 1, 1)
    assert (one["differences"], one["failures"]) == (found[:1], found[1:])
    record.write(record.merged("programs", [record.part([one], **HEAD, commit="aaa")]), path)
    assert overlapping(path, range(10, 12), "plain") == []  # the same programs: they are replaced
    assert overlapping(path, range(11, 20), "plain") == [range(10, 12)]
    assert overlapping(path, range(12, 20), "plain") == []
    assert overlapping(path, range(11, 20), None) == []


def test_a_program_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[int, int]:
        raise TypeError("no such constant")

    monkeypatch.setattr(run, "differences", broken)
    result = run.check(3, None)
    assert (result["error"], result["differing_elements"]) == ("TypeError: no such constant", {})
