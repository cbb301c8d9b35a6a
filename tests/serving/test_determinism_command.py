"""The command `bijax test-deterministic`."""

import pytest

from bijax.cli import main
from bijax.determinism.command import MODES

SMALL = "--model toy --max-running 2 --max-prefill-tokens 16 --num-pages 40 --page-size 4 --max-new-tokens 12".split()


# `make test` runs the modes against servers (test_determinism_remote.py), and one of these with the control.
@pytest.mark.tier("full")
@pytest.mark.parametrize("mode", MODES)
def test_one_answer_each(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test-deterministic", "--mode", mode, "--trials", "4", *SMALL]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert rows
    for _, _, total, unique, bits in rows:
        assert int(total) >= 4 or mode in ("mixed", "prefix")
        assert unique.strip() == bits.strip() == "1"


def test_plain_operations_give_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test-deterministic", "--mode", "speculative", "--trials", "3", "--plain", *SMALL]) == 1
    assert "plain JAX" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "0"], "--trials must be at least 1, got 0"),
        (["--page-size", "0"], "page_size must be at least 1"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", "toy"]
    assert main(["test-deterministic", *model, *arguments]) == 2
    assert message in capsys.readouterr().err
