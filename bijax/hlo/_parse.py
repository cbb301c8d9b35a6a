"""Parses HLO text: of compiled programs, of XLA's dumps, or written by hand."""

import re
from collections.abc import Iterator
from typing import Final

from bijax.hlo._frames import read_frames
from bijax.hlo._module import Computation, Instruction, Module
from bijax.hlo.errors import HloParseError

_TABLES: Final = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_COMMENT: Final = re.compile(r"/\*.*?\*/")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_MARK: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_MODULE: Final = re.compile(r"\s*HloModule\s+([^\s,]+)")
_COMPUTATION: Final = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-$]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION: Final = re.compile(r"\s*(?:ROOT\s+)?%?([\w.\-$]+)\s*=\s*")
_OPCODE: Final = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPEN: Final = "({["
_WITHOUT_OPERANDS: Final = ("parameter", "constant", "iota")
_SHOWN: Final = 200


def parse(text: str) -> list[Module]:
    r"""Reads the modules of a text.

    Args:
        text: One or more modules, as in `jax.stages.Compiled.as_text()` and XLA's dumps. Text before
            the first is ignored.

    Raises:
        HloParseError: If there is no module in it, or a module cannot be read.

    Example:
        >>> (module,) = parse("HloModule m\nENTRY e {\n  ROOT a = f32[2]{0} parameter(0)\n}")
        >>> module.computations["e"].instructions["a"].shapes
        (Shape(dtype='f32', dims=(2,)),)
    """
    parts: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if start := _MODULE.match(line):
            parts.append((start.group(1), []))
        elif parts:
            parts[-1][1].append(line)
    if not parts:
        raise HloParseError(
            f'expected the text of an HLO module, which has a line "HloModule NAME"; got {len(text)} characters that '
            f"start {text[:_SHOWN]!r}. jax.jit(f).lower(...).compile().as_text() is such a text; so is a file "
            "*after_optimizations.txt of an XLA dump."
        )
    return [_module(name, lines) for name, lines in parts]


def _module(name: str, lines: list[str]) -> Module:
    tables: dict[str, list[str]] = {}
    computations: dict[str, Computation] = {}
    table, root, header = "", "", None
    body: dict[str, Instruction] = {}
    for statement in _statements(lines):
        stripped = statement.strip()
        if header and stripped.startswith("}"):
            computations[header.group(2)] = Computation(header.group(2), body, bool(header.group(1)), root)
            header, body, root = None, {}, ""
        elif header and stripped:
            instruction = _instruction(statement)
            body[instruction.name] = instruction
            root = instruction.name if stripped.startswith("ROOT ") else root
        elif stripped in _TABLES:
            table = stripped
        elif start := _COMPUTATION.match(statement):
            header = start
        elif stripped:
            tables.setdefault(table, []).append(stripped)
    if header or not computations:
        raise HloParseError(
            f"module {name!r}: expected computations in braces; "
            + (f"{header.group(2)!r} does not end" if header else "found none")
            + ". Is the text cut off?"
        )
    return Module(name, computations, read_frames(tables))


def _statements(lines: list[str]) -> Iterator[str]:
    """Yields lines, joining those of an instruction that spans several."""
    held, depth = "", 0
    for line in lines:
        if line.lstrip().startswith("//"):
            continue
        line = _COMMENT.sub("", line) if "/*" in line else line
        if not held and (_COMPUTATION.match(line) or line.lstrip().startswith("}")):
            yield line
            continue
        bare = _STRING.sub("''", line)
        depth += sum(map(bare.count, "({[")) - sum(map(bare.count, ")}]"))
        held = f"{held} {line.strip()}" if held else line
        if depth <= 0 and not bare.rstrip().endswith((",", "=")):
            yield held
            held, depth = "", 0
    if held:
        yield held


def _instruction(statement: str) -> Instruction:
    start = _INSTRUCTION.match(statement)
    if not start:
        raise HloParseError(f"expected an instruction NAME = SHAPE OPCODE(...); got {statement.strip()[:_SHOWN]!r}")
    end = start.end()
    is_tuple = statement[end : end + 1] == "("
    shape_end = _closing(statement, end) + 1 if is_tuple else statement.find(" ", end)
    opcode = _OPCODE.match(statement, shape_end) if shape_end > 0 else None
    if not opcode:
        raise HloParseError(f"expected OPCODE(...) after the shape; got {statement.strip()[:_SHOWN]!r}")
    close = _closing(statement, opcode.end() - 1)
    inside = statement[opcode.end() : close]
    operands = [] if opcode.group(1) in _WITHOUT_OPERANDS else _split(inside)
    attributes = [part.split("=", 1) for part in _split(statement[close + 1 :].lstrip(" ,")) if "=" in part]
    if opcode.group(1) == "parameter":
        attributes.append(["number", inside])
    return Instruction(
        name=start.group(1),
        opcode=opcode.group(1),
        shape_text=statement[end:shape_end].strip(),
        operands=tuple(operand.split()[-1].lstrip("%") for operand in operands),
        attributes={key.strip(): value.strip() for key, value in attributes},
    )


def _closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at `start`."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        if mark.group() in _OPEN:
            depth += 1
        elif mark.group() in ")}]":
            depth -= 1
        if depth == 0:
            return mark.start()
    raise HloParseError(f"expected brackets in pairs; got {text.strip()[:_SHOWN]!r}")


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets and strings."""
    parts, depth, start = [], 0, 0
    for mark in _MARK.finditer(text):
        if mark.group() in _OPEN:
            depth += 1
        elif mark.group() in ")}]":
            depth -= 1
        elif mark.group() == "," and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part for part in map(str.strip, [*parts, text[start:]]) if part]
