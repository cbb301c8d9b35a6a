"""An HLO module as plain data."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from bijax.hlo._frames import Frames
from bijax.hlo._shape import Shape, shapes_in

_STRING_ATTRIBUTE: Final = re.compile(r'([\w.\-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s",{}]+))')
_NAME: Final = re.compile(r"%?([\w.\-$]+)")
_CALLED: Final = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Unique in its computation.
        opcode: As HLO writes it: "dot", "all-reduce-start".
        shape_text: Its shape with layouts.
        operands: Names of the instructions that it reads.
        attributes: Text of each attribute after the operands; "number" for a parameter.
    """

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    attributes: dict[str, str]

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of its result."""
        return shapes_in(self.shape_text)

    @property
    def is_float(self) -> bool:
        """Whether the first array of its result is of a floating type."""
        return bool(self.shapes) and self.shapes[0].is_float

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """Its origin: "op_name", "stack_frame_id", "source_file", ..."""
        return _strings(self.attributes.get("metadata", ""))

    @functools.cached_property
    def frontend_attributes(self) -> dict[str, str]:
        """Attributes set by the program."""
        return _strings(self.attributes.get("frontend_attributes", ""))

    @property
    def target(self) -> str:
        """The function that a custom call invokes; empty otherwise."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Its backend configuration if it is JSON, as XLA's is; empty otherwise."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text)
            if isinstance(value, str):  # older programs quote it
                value = json.loads(value)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def fusion_config(self) -> dict[str, Any]:
        """The part of the configuration for compiling a fusion."""
        for key in ("fusion_backend_config", "fusion_config"):
            if isinstance(inner := self.config.get(key), dict):
                return inner
        return self.config

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        return tuple(name for key in _CALLED for name in self.called_as(key))

    def called_as(self, key: str) -> tuple[str, ...]:
        """Returns the names of the computations in one attribute, such as "to_apply"."""
        return tuple(_NAME.findall(self.attributes.get(key, "")))

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as `lhs_contracting_dims={1}`."""
        return tuple(map(int, re.findall(r"\d+", self.attributes.get(key, ""))))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module.

    Attributes:
        name: Unique in the module.
        instructions: By name, in the order of the text.
        is_entry: Whether it is the entry point of the program.
        root: Name of the instruction that is its result.
    """

    name: str
    instructions: dict[str, Instruction]
    is_entry: bool = False
    root: str = ""

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions that an instruction reads."""
        return tuple(self.instructions[name] for name in instruction.operands if name in self.instructions)

    def users(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions that read an instruction."""
        return tuple(self.instructions[name] for name in self._users.get(instruction.name, ()))

    @functools.cached_property
    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction.name)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        name: Its name.
        computations: By name.
        frames: Tables of source lines.
    """

    name: str
    computations: dict[str, Computation]
    frames: Frames

    def __iter__(self) -> Iterator[tuple[Computation, Instruction]]:
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """The instructions that call each computation."""
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation, instruction in self:
            for name in instruction.called:
                callers.setdefault(name, []).append((computation, instruction))
        return callers

    def producer(self, computation: Computation, instruction: Instruction) -> tuple[Computation, Instruction] | None:
        """Returns the producer of an instruction's first operand, looking through views and parameters of fusions."""
        source = next(iter(computation.operands(instruction)), None)
        if source is None:
            return None
        if source.opcode in ("bitcast", "convert", "copy", "reshape", "get-tuple-element"):
            return self.producer(computation, source)
        callers = self.callers.get(computation.name, [])
        if source.opcode != "parameter" or len(callers) != 1 or callers[0][1].opcode != "fusion":
            return computation, source
        outer, call = callers[0]
        given = outer.instructions.get(call.operands[int(source.attributes["number"])])
        if given is None or given.opcode in ("bitcast", "convert", "copy", "reshape", "get-tuple-element"):
            return self.producer(outer, given) if given else None
        return outer, given

    @functools.cached_property
    def added_over_first_dimension(self) -> frozenset[str]:
        """Names of the operands of reductions over only the first dimension."""
        reduces = ((c, i) for c, i in self if i.opcode == "reduce" and i.integers("dimensions") == (0,))
        return frozenset(found[1].name for c, i in reduces if (found := self.producer(c, i)))

    def opcodes(self, names: tuple[str, ...]) -> set[str]:
        """Returns the opcodes in computations of these names, without parameters and constants."""
        found = {
            i.opcode
            for name in names
            if name in self.computations
            for i in self.computations[name].instructions.values()
        }
        return found - {"parameter", "constant", "tuple", "get-tuple-element"}


def _strings(text: str) -> dict[str, str]:
    return {key: quoted or bare for key, quoted, bare in _STRING_ATTRIBUTE.findall(text)}
