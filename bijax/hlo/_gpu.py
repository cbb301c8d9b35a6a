"""Element-wise code of a GPU program whose bits may depend on the shape.

`bijax.invariant` puts integer operations after each function, product and rounding (`bijax.transform.gpu.fences`).
This module looks for them. XLA is free to rewrite a value without one: for another shape it may use another code
generator, contract the value with a sum, or drop its rounding.
"""

from typing import Final

from bijax.hlo._flow import readers
from bijax.hlo._libraries import Verdict
from bijax.hlo._module import Computation, Instruction, Module
from bijax.hlo._opcodes import TRANSCENDENTAL

Found = tuple[str, Verdict, str, str]

_TRITON: Final = "__triton"
_SHIFT: Final = "shift-right-logical"
_FENCE: Final = frozenset(("and", "or", _SHIFT, "xor"))
_CHOICE: Final = frozenset(("compare", "select"))  # in float64 the fence is a select by the shifted bits
_FUNCTIONS: Final = TRANSCENDENTAL | {"divide", "remainder", "sqrt"}
_SUMS: Final = frozenset(("add", "subtract"))
_NARROW: Final = ("f16", "bf16")
_ROUNDED: Final = _FUNCTIONS | _SUMS | {"convert", "multiply"}
_IN_TRITON: Final = "a function in a Triton fusion: XLA's loop emitter would give it different bits"
_OPEN: Final = "a function without a fence: by the shape, XLA gives its fusion to Triton or to its loop emitter"
_NEXT_TO_A_SUM: Final = "a product without a fence next to a sum: contracted in one fusion, not in two"
_ROUNDING: Final = "rounded to 16 bits without a fence: XLA drops a rounding that meets a conversion back"


def elementwise(module: Module, computation: Computation, i: Instruction) -> Found | None:
    """Returns why the bits of an element-wise instruction may depend on the shape; None if they do not.

    Args:
        module: The program.
        computation: The computation of the instruction.
        i: The instruction.
    """
    if not i.is_float or not i.shapes[0].dims:
        return None
    if i.opcode in _FUNCTIONS:
        if is_in_triton(module, computation):
            return "elementwise", "variant", "Triton", _IN_TRITON
        if not _is_fenced(module, computation, i):
            return "elementwise", "variant", "XLA", _OPEN
    narrow = i.shapes[0].dtype in _NARROW
    if i.opcode == "multiply" and not narrow and _meets(_SUMS, module, computation, i):
        return "elementwise", "variant", "XLA", _NEXT_TO_A_SUM
    if narrow and _rounds(computation, i) and _meets(_ROUNDED, module, computation, i):
        return "rounding", "variant", "XLA", _ROUNDING
    return None


def _meets(opcodes: frozenset[str], module: Module, computation: Computation, i: Instruction) -> bool:
    return any(reader.is_float and reader.opcode in opcodes for reader in readers(module, computation, i))


def _rounds(computation: Computation, i: Instruction) -> bool:
    """Returns whether an instruction with a 16-bit result rounds it."""
    if i.opcode == "convert":
        return any(o.shapes[0].dtype not in _NARROW for o in computation.operands(i))
    return i.opcode in _ROUNDED


def _is_fenced(module: Module, computation: Computation, i: Instruction) -> bool:
    found = {reader.opcode for reader in readers(module, computation, i)}
    if i.shapes[0].dtype == "f64" and _SHIFT in found:
        found -= _CHOICE
    return bool(found) and found <= _FENCE


def is_in_triton(module: Module, computation: Computation) -> bool:
    """Returns whether a computation is compiled by Triton, as a fusion of element-wise code and reductions."""
    return any(call.fusion_config.get("kind") == _TRITON for _, call in module.callers.get(computation.name, ()))
