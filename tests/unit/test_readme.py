"""The README's example runs, and names things that exist."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import bijax
from bijax.testing import assert_batch_invariant
from tests.exhaustive import rarely

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"batch_sizes": (3,), "modes": ("jit",)}, {"300": "40", "577": "24", "77": "16"}), rarely({}, {})],
    ids=["few sizes", "as written"],
)
def test_the_example_runs(options: dict[str, Any], sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bijax.testing.assert_batch_invariant", functools.partial(assert_batch_invariant, **options))
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for size, smaller in sizes.items():
        assert size in example
        example = example.replace(size, smaller)
    exec(compile(example, "README.md", "exec"), {})


def test_the_guarantee_table_names_operations() -> None:
    (row,) = (line for line in README.splitlines() if line.startswith("| `row-invariant`"))
    named = set(re.findall(r"`(\w+)`", row))
    assert {"matmul", "sum", "softmax", "paged_attention"} <= named
    for name in named:
        assert callable(getattr(bijax, name)), name
        assert "Guarantee: row-invariant" in (getattr(bijax, name).__doc__ or ""), name
