"""The blocks of a page of the documentation, and running them as a reader would.

`python -m tests.docs.pages PAGE` runs one page, in the present folder; several pages run in a folder and in a process
of their own each, which begins where the libraries have been imported:

- a block of `python` is executed, all of them in one namespace; a block of `text` right after one is what it prints;
- a block of `python` with a caption is a file of that name;
- in a block of `console`, lines that start with `$` are commands, and the others what they print.

What is printed is compared as in a doctest: `...` stands for anything, and white space does not count. A comment
`<!-- not run: REASON -->` in front of a block says why it is left out. Blocks with the reason `GPU` run with `--gpu`.
"""

import contextlib
import dataclasses
import doctest
import io
import linecache
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
GPU = "needs an NVIDIA GPU"
"""The reason of blocks that run where there is one, with `--gpu`."""
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_DIRECTIVE = re.compile(r"\{code-block\} (\w+)")
_OPTION = re.compile(r":(\w+): (.*)")
_COMPARE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: What follows the fence.
        content: The lines inside.
        line: Number of its first line in the page.
        caption: Name of the file that it is, or "".
        not_run: Why it is left out, or "".
        output: What it prints, if the page says so.
    """

    language: str
    content: str
    line: int
    caption: str = ""
    not_run: str = ""
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, those that show an output joined to the ones before."""
    found: list[Block] = []
    reason, behind_python = "", False
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (match := _NOT_RUN.match(token.content)):
            reason = match[1]
        elif token.type == "fence":
            assert token.map
            block = _block(token.info, token.content, token.map[0] + 2, reason)
            if behind_python and block.language == "text":
                found[-1] = dataclasses.replace(found[-1], output=block.content)
            else:
                found.append(block)
            reason, behind_python = "", block.language == "python" and not block.caption
        else:
            reason, behind_python = "", False
    return found


def _block(info: str, content: str, line: int, reason: str) -> Block:
    directive = _DIRECTIVE.fullmatch(info)
    if not directive:
        return Block(info, content, line, not_run=reason)
    lines = content.splitlines(keepends=True)
    options = dict(m.groups() for m in map(_OPTION.match, lines) if m)
    body = lines[len(options) :]
    return Block(directive[1], "".join(body), line + len(options), options.get("caption", ""), reason)


def commands(block: Block) -> list[tuple[str, str]]:
    """Returns the commands of a console block, each with what it prints."""
    found: list[tuple[str, str]] = []
    for line in block.content.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        else:
            command, output = found[-1]
            found[-1] = (command, f"{output}{line}\n")
    return found


def run(page: Path, *, gpu: bool = False) -> None:
    """Runs the blocks of a page in this process and folder: those for a GPU, or the others.

    Raises:
        AssertionError: If something else is printed than the page says.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.not_run != (GPU if gpu else ""):
            continue
        where = f"{page.name}:{block.line}"
        if block.caption:
            Path(block.caption).write_text(block.content, encoding="utf-8")
        elif block.language == "python":
            _compare(_execute(block, where, namespace), block.output, where)
        elif block.language == "console":
            for command, output in commands(block):
                _compare(_shell(command), output or None, f"{where}: {command}")


def run_each(pages: Sequence[Path]) -> None:
    """Runs several pages, each in a process and an empty folder of its own.

    Raises:
        AssertionError: If a page fails; it names those that do.
    """
    import bijax  # noqa: F401
    import flax_layers  # noqa: F401

    failed = []
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            process = multiprocessing.get_context("fork").Process(target=_run_in, args=(page, folder))
            process.start()
            process.join()
        if process.exitcode:
            failed.append(str(page))
    assert not failed, f"these pages fail: {', '.join(failed)}"


def _run_in(page: Path, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)  # as at the start of a process; a page may write a module
    run(page)


def _execute(block: Block, where: str, namespace: dict[str, Any]) -> str:
    name = f"{where.replace(':', '-')}.py"
    linecache.cache[name] = (len(block.content), None, block.content.splitlines(keepends=True), name)
    with _printed() as text:
        exec(compile(block.content, name, "exec"), namespace)
    return text.getvalue()


def _shell(command: str) -> str:
    """Runs `bijax` in this process, where nothing has to be imported again, and other commands in one of their own."""
    words = shlex.split(command)
    if words[0] == "bijax":
        from bijax.cli import main

        with _printed() as text:
            main(words[1:])
        return text.getvalue()
    if words[0] == "python":
        words[0] = sys.executable
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    return done.stdout


@contextlib.contextmanager
def _printed() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield text


def _compare(printed: str, expected: str | None, where: str) -> None:
    if expected is not None and not doctest.OutputChecker().check_output(expected, printed, _COMPARE):
        raise AssertionError(f"{where}: the page says\n{expected}\nbut it prints\n{printed}")


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:] if name != "--gpu"]
    if len(given) == 1:
        run(given[0], gpu="--gpu" in sys.argv)
    else:
        run_each(given)
