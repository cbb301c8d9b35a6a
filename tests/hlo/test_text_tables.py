"""Tables as plain text: as wide as they are, or broken to the width of a terminal."""

import os

import pytest

from bijax.hlo import _table
from bijax.hlo._table import Rows

ROWS = Rows(
    "3 operations",
    ("verdict", "operation", "FLOPs", "why"),
    (
        ("variant", "dot_general", "99.1 %", "products are added in an order that a library chooses by the shapes"),
        ("invariant", "add, broadcast_in_dim, transpose", "", "exact"),
    ),
    "not invariant: 1 variant",
    right=(2,),
)


def test_without_a_limit_each_row_is_one_line() -> None:
    lines = ROWS.plain().splitlines()
    assert len(lines) == 5
    assert lines[2].endswith("a library chooses by the shapes")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_columns_fit_the_width_and_lose_no_word(width: int) -> None:
    text = ROWS.plain(width)
    title, *body, footer = text.splitlines()
    assert max(map(len, body)) <= width
    assert (title, footer) == (ROWS.title, ROWS.footer)
    assert sorted(text.split()) == sorted(ROWS.plain().split())


def test_a_terminal_gives_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(_table.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((70, 20)))
    assert ROWS.plain() == ROWS.plain(70)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert len(ROWS.plain().splitlines()) == 5
