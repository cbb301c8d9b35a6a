"""The origin of an instruction: the user's line, and whether it is the code of a bijax kernel."""

import functools
from collections.abc import Callable, Iterator
from typing import Final

from bijax.core.tag import KERNEL, TAG
from bijax.hlo._module import Computation, Instruction, Module
from bijax.hlo._opcodes import APPROXIMATED, REDUCING, TRANSCENDENTAL
from bijax.hlo._untagged import Class

_FAR: Final = 3


class Origin:
    """Inspects an instruction, its neighbours and its callers.

    Args:
        module: The program.
        untagged: What had no tag before XLA's rewrites; None if only the optimised program is available.
    """

    def __init__(self, module: Module, untagged: Callable[[], frozenset[Class]] | None):
        self._module = module
        self._untagged = functools.cache(untagged) if untagged else None

    def is_ours(self, computation: Computation, instruction: Instruction, of: Class | None) -> bool:
        """Returns whether an instruction is the code of a bijax kernel.

        Args:
            computation: Its computation.
            instruction: The instruction.
            of: Why it would be variant; None if the tag alone decides.
        """
        if instruction.opcode == "fusion" and (inner := list(self._inner(instruction))):
            # The tag of a fusion is the tag of its last instruction only.
            mine = all(self.is_ours(*member, of) for member in inner)
            return mine or (len(inner) == 1 and self._stands_for_tagged(computation, instruction))
        if is_tagged(instruction) or self._stands_for_tagged(computation, instruction):
            return True
        if of is None or self._untagged is None:
            return False
        return of not in self._untagged()

    def has_untagged(self, of: Class) -> bool:
        """Returns whether something of a class had no tag before XLA's rewrites; False if unknown."""
        return self._untagged is not None and of in self._untagged()

    def has_lost_its_tag(self, instruction: Instruction) -> bool:
        """Returns whether XLA recreated the instruction, in a program with bijax kernels."""
        return self._has_kernels and not instruction.metadata and not instruction.frontend_attributes

    @functools.cached_property
    def _has_kernels(self) -> bool:
        return any(is_tagged(i) for _, i in self._module)

    def source(self, computation: Computation, instruction: Instruction) -> str:
        """Returns "FILE:LINE" in the user's program, prefixed by "~" if it is a neighbour's; or empty."""
        for distance, other in self._near(computation, instruction):
            if line := self._module.frames.source(other.metadata):
                return f"~{line}" if distance else line
        return ""

    def operation(self, computation: Computation, instruction: Instruction) -> str:
        """Returns the name of the traced operation, such as "jit(f)/dot_general"; or empty."""
        for _, other in self._near(computation, instruction):
            if "op_name" in other.metadata:
                return other.metadata["op_name"]
        return ""

    def product_class(self, multiply: Instruction) -> Class:
        """Returns the class of a product: of the operation that became a polynomial, or its own."""
        name = multiply.metadata.get("op_name", "").rpartition("/")[2]
        return "approximation" if name in APPROXIMATED else "product"

    def _stands_for_tagged(self, computation: Computation, instruction: Instruction) -> bool:
        """Returns whether an instruction without an origin replaces a tagged one, which is now its reshape."""
        if not self.has_lost_its_tag(instruction):
            return False
        users = computation.users(instruction)
        return bool(users) and all(
            u.opcode in ("bitcast", "reshape")
            and is_tagged(u)
            and u.metadata.get("op_name", "").rpartition("/")[2] == "dot_general"
            for u in users
        )

    def _inner(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the instructions of a fusion that combine elements or are approximated."""
        for name in fusion.called_as("calls"):
            if computation := self._module.computations.get(name):
                for i in computation.instructions.values():
                    if i.opcode in REDUCING | TRANSCENDENTAL:
                        yield computation, i
                    elif i.opcode == "fusion":
                        yield from self._inner(i)

    def _near(self, computation: Computation, instruction: Instruction) -> Iterator[tuple[int, Instruction]]:
        """Yields an instruction, its callers' and its neighbours, the nearest first."""
        seen = {instruction.name}
        ring = [instruction]
        for distance in range(_FAR):
            for member in ring:
                yield distance, member
            around = [n for i in ring for n in (*computation.users(i), *computation.operands(i))]
            ring = []
            for neighbour in around:
                if neighbour.name not in seen and neighbour.opcode not in ("parameter", "constant"):
                    seen.add(neighbour.name)
                    ring.append(neighbour)
        callers = self._module.callers.get(computation.name, ())
        if len(callers) == 1 and not computation.is_entry and callers[0][0] is not computation:
            yield from ((distance + 1, member) for distance, member in self._near(*callers[0]))


def is_tagged(instruction: Instruction) -> bool:
    """Returns whether an instruction carries the tag of a kernel."""
    return instruction.frontend_attributes.get(TAG) == KERNEL
