"""The instructions that read a value, through moves and across fusion boundaries."""

from collections.abc import Iterator
from typing import Final

from bijax.hlo._module import Computation, Instruction, Module

# fmt: off
_MOVES: Final = frozenset((
    "bitcast", "bitcast-convert", "broadcast", "concatenate", "copy", "dynamic-slice", "get-tuple-element", "pad",
    "reshape", "reverse", "slice", "transpose", "tuple",
))
# fmt: on
_HELD: Final = ("fusion", "call")


def readers(module: Module, computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that read a value, each once, looking through those that only move it.

    A value that is bitcast to integers of its width is followed no further: the readers of those are yielded.

    Args:
        module: The program.
        computation: Where the value is computed.
        instruction: The instruction that computes it.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [(computation, instruction)]
    while waiting:
        where, value = waiting.pop()
        if (where.name, value.name) in seen:
            continue
        seen.add((where.name, value.name))
        for user in where.users(value):
            if user.opcode in _MOVES:
                waiting.append((where, user))
            elif user.opcode in _HELD:
                waiting += _inside(module, user, value)
            else:
                yield user
        if not where.is_entry and value.name == where.root:
            waiting += [(outer, call) for outer, call in module.callers.get(where.name, ()) if call.opcode in _HELD]


def _inside(module: Module, call: Instruction, value: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the parameters of the called computations that receive a value."""
    numbers = {str(n) for n, name in enumerate(call.operands) if name == value.name}
    for name in call.called:
        if inner := module.computations.get(name):
            for i in inner.instructions.values():
                if i.opcode == "parameter" and i.attributes["number"] in numbers:
                    yield inner, i
