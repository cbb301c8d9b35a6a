"""What a report looks like: text, rich, JSON."""

import io
import json
import subprocess
import sys

import pytest

from bijax import hlo
from tests.hlo import gpu_programs

REPORT = hlo.inspect(gpu_programs.SPLIT_K_SAID)


def test_text():
    lines = str(REPORT).splitlines()
    assert lines[0].startswith("optimised program for gpu")
    assert lines[2].split()[:6] == ["variant", "fusion", "__triton_gemm", "16x64x128", "split_k", "4"]
    assert "model.py:12" in lines[2]
    assert lines[-1] == "not invariant: 2 variant"
    nothing = hlo.inspect(gpu_programs.module("  ROOT %a = f32[8,64]{1,0} add(%x, %x)"))
    assert str(nothing).splitlines()[-1] == "invariant: nothing found"
    assert len(str(nothing).splitlines()) == 2


def test_json():
    found = json.loads(json.dumps(REPORT.to_json()))
    assert found["invariant"] is False
    assert [f["split_k"] for f in found["findings"]] == [4, 1]
    assert found["findings"][0]["dtypes"] == ["bf16"]
    comparison = hlo.compare(REPORT, hlo.inspect(gpu_programs.CUBLAS))
    assert json.loads(json.dumps(comparison.to_json()))["alike"] is False


def test_rich():
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), width=70, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(REPORT)
    console.print(hlo.compare(REPORT, REPORT))
    text = console.file.getvalue()
    assert "\x1b[" in text
    assert "split_k" in text
    assert "1 GEMM fusion: tiles" in text
    assert "the programs' reductions are equal" in text


def test_verdicts_and_numbers_are_whole_on_a_narrow_terminal():
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=50)
    console.print(hlo.inspect(gpu_programs.CUBLAS))
    words = console.file.getvalue().split()
    assert {"verdict", "variant", "FLOPs"} <= set(words)


def test_nothing_of_rich_is_needed():
    code = f"""
import sys
sys.modules["rich"] = None
from bijax import hlo
print(hlo.inspect({gpu_programs.CUBLAS!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cuBLAS" in done.stdout


def test_other_tiles_are_a_difference():
    other = hlo.inspect(gpu_programs.SPLIT_K_SAID.replace('"block_m":"16"', '"block_m":"32"'))
    found = hlo.compare(REPORT, other)
    assert [(d.finding.tile, d.small, d.large) for d in found.differences] == [("16x64x128", 1, 0), ("32x64x128", 0, 1)]
    unsplit = hlo.inspect(gpu_programs.SPLIT_K_SAID.replace('"split_k":"4"', '"split_k":"2"'))
    assert {d.finding.split_k for d in hlo.compare(REPORT, unsplit).differences} == {2, 4}


def test_other_shapes_are_none():
    wider = hlo.inspect(gpu_programs.SPLIT_K_SAID.replace("[8,", "[16,").replace("[4,8,", "[4,16,"))
    assert hlo.compare(REPORT, wider).alike


def test_our_schedules_may_differ():
    ours = ', frontend_attributes={bijax="kernel"}'
    tagged = hlo.inspect(gpu_programs.custom_call("mosaic_gpu_v2", ours))
    assert hlo.compare(tagged, hlo.inspect(gpu_programs.custom_call("another_kernel", ours))).alike
    plain = hlo.inspect(gpu_programs.custom_call("mosaic_gpu_v2"))
    assert not hlo.compare(plain, hlo.inspect(gpu_programs.custom_call("another_kernel"))).alike
