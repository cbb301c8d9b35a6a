"""The README's examples run, and name things that exist."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import bijax
from bijax.testing import assert_batch_invariant
from tests.tiers import full_only

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "True\n"


def traced(function: Any, x: jax.Array) -> None:
    assert len(jax.eval_shape(function, x)) == len(x)


@pytest.mark.parametrize(
    ("check", "sizes"),
    [
        (traced, {}),
        full_only(
            functools.partial(assert_batch_invariant, batch_sizes=(3,), modes=("jit",)),
            {"300": "40", "577": "24", "77": "16"},
        ),
        full_only(assert_batch_invariant, {}),
    ],
    ids=["traced", "few sizes", "as written"],
)
def test_the_example_runs(check: Any, sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bijax.testing.assert_batch_invariant", check)
    (example,) = (e for e in EXAMPLES if "assert_batch_invariant" in e)
    assert example.count("assert_batch_invariant(") == 2
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
