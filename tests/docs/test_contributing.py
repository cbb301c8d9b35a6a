"""What CONTRIBUTING.md says of the sources: its paths exist, and so does the way from a call to a kernel."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PLANNED = ("pallas_kernels/matmul/blackwell/", "pallas_kernels/collective_matmul/")
"""Places of what does not exist yet."""
MADE = ("build/", "docs/generated", "benchmarks/results/programs_MACHINE.json")
BASES = ("", "bijax", "bijax/transform", "bijax/transform/rows", "bijax/ops/attention", "pallas_kernels")
OF_KERNELS = ("pallas_kernels/attention", "pallas_kernels/attention/jax_triton", "pallas_kernels/backends")
"""Folders that the text is about where it names a file of one."""
MOST_STEPS, MOST_FILES = 8, 7


def test_paths_exist() -> None:
    named = [text.split(":")[0] for text in re.findall(r"`([^`\n]+)`", PAGE)]
    paths = {t for t in named if ("/" in t or t.endswith(".py")) and not re.search(r"[\s(<{*=']", t)}
    paths -= {path for path in paths if path.startswith(MADE) or path in ("versions/", "kernels.py")}
    assert len(paths) > 40
    missing = [path for path in paths if not any((ROOT / base / path).exists() for base in (*BASES, *OF_KERNELS))]
    assert sorted(missing) == sorted(PLANNED)


def test_the_way_from_a_call_to_the_kernel() -> None:
    """Each step names a function or constant of its file, which calls that of the next one."""
    (way,) = re.findall(r"\*\*From a call to the kernel\.\*\*.*?\n\n", PAGE, re.DOTALL)
    steps = re.findall(r"`([\w/]+\.py): (\w+)`", way)
    assert [name for _, name in steps][:3] == ["matmul", "differentiable_matmul", "matmul_kernel"]
    files = {path for path, _ in steps} | {"pallas_kernels/backends/hopper.py"}
    assert way.count("→") + 1 <= MOST_STEPS
    assert len(files) <= MOST_FILES
    for path, name in steps:
        assert re.search(rf"^(def {name}\b|{name}\b.* = )", (ROOT / path).read_text(), re.MULTILINE), f"{path}: {name}"
    for (path, _), (_, name) in zip(steps, [*steps[1:3], ("", "multiply"), ("", '"matmul"')], strict=False):
        assert name in (ROOT / path).read_text()
    assert '"matmul"' in (ROOT / "pallas_kernels/backends/hopper.py").read_text()
    assert f"{steps[-1][1]}(" in (ROOT / steps[-2][0]).read_text()
