"""The README's example runs, and names things that exist."""

import re
from pathlib import Path

import bijax

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_the_guarantee_table_names_operations() -> None:
    (row,) = (line for line in README.splitlines() if line.startswith("| `row-invariant`"))
    named = set(re.findall(r"`(\w+)`", row))
    assert {"matmul", "sum", "softmax", "paged_attention"} <= named
    for name in named:
        assert callable(getattr(bijax, name)), name
        assert "Guarantee: row-invariant" in (getattr(bijax, name).__doc__ or ""), name
