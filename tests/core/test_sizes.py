"""No function is longer than 100 lines of code, and no call has more than 8 positional arguments."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "bijax", "flax_layers")
MOST_LINES, MOST_ARGUMENTS = 100, 8
_EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_MORE_ARGUMENTS = tuple(f"pallas_kernels/delta_rule/jax_triton/{name}.py" for name in ("launch", "gradients"))
"""Launches that take pointers one by one."""


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Returns the numbers of the lines that are code: neither blank nor comments nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def too_large(source: str) -> Iterator[tuple[str, str, int]]:
    """Yields functions with more lines, and calls with more positional arguments, that are not unpacked."""
    tree = ast.parse(source)
    lines: set[int] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.end_lineno or node.lineno
            if last - node.lineno < MOST_LINES:
                continue
            lines = code_lines(source, tree) if lines is None else lines
            count = sum(node.lineno <= line <= last for line in lines)
            if count > MOST_LINES:
                yield "function", node.name, count
        elif isinstance(node, ast.Call):
            count = sum(not isinstance(a, ast.Starred) for a in node.args)
            if count > MOST_ARGUMENTS:
                yield "call", ast.unparse(node.func), count


def test_functions_and_calls_are_small() -> None:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            large = [*too_large(path.read_text())]
            if name.startswith(_WITH_MORE_ARGUMENTS):
                large = [each for each in large if each[0] != "call"]
            if large:
                found[name] = large
    assert found == {}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def f():\n" + "    x = 1\n" * 100, "function"),
        ("f(1, 2, 3, 4, 5, 6, 7, 8, 9)", "call"),
        ("f(1, 2, 3, 4, 5, 6, 7, 8, 9, *rest)", "call"),
    ],
)
def test_what_is_larger_is_found(source: str, kind: str) -> None:
    assert [each[0] for each in too_large(source)] == [kind]


@pytest.mark.parametrize(
    "source",
    ["def f():\n    '''Doc.'''\n\n    # why\n" + "    x = 1\n" * 99, "f(1, 2, 3, 4, 5, 6, 7, 8, ninth=9)", "f(*a, *b)"],
)
def test_what_is_not_is_not(source: str) -> None:
    assert not [*too_large(source)]
