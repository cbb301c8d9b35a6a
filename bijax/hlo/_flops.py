"""Floating-point operations of a program: the share of each instruction."""

import functools
import math
import re
from typing import Any, Final

from bijax.hlo._module import Computation, Instruction, Module
from bijax.hlo._opcodes import ARITHMETIC
from bijax.hlo._shape import Shape

_WINDOW: Final = re.compile(r"\bsize=(\d+(?:x\d+)*)")


class Flops:
    """FLOPs of the instructions of a module, for one execution of the program.

    A loop counts its trips where XLA knows them, and once elsewhere. Library calls whose shapes do not determine
    their work count as zero.

    Args:
        module: The program.
    """

    def __init__(self, module: Module):
        self._module = module
        self.total = sum(self.of(c, i) for c, i in module if not i.called_as("calls"))

    def of(self, computation: Computation, instruction: Instruction) -> int:
        """Returns the FLOPs of an instruction, including those of the computations in a fusion."""
        return self._runs(computation.name) * self._once(computation, instruction)

    @functools.cache  # noqa: B019 (lives as long as one inspection)
    def _runs(self, name: str) -> int:
        """Returns how often a computation runs."""
        if name in self._module.computations and self._module.computations[name].is_entry:
            return 1
        return sum(
            self._runs(caller.name) * _trips(i)
            for caller, i in self._module.callers.get(name, ())
            if caller.name != name
        )

    def _once(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode == "fusion":
            inner = [
                self._module.computations[n] for n in instruction.called_as("calls") if n in self._module.computations
            ]
            return sum(self._once(c, i) for c in inner for i in c.instructions.values())
        if not instruction.shapes:
            return 0
        if "cudnn_fmha_backend_config" in instruction.config:
            return _attention(computation, instruction)
        if terms := terms_of(computation, instruction):
            return _count(computation, instruction, terms)
        if instruction.opcode in ARITHMETIC and instruction.is_float:
            return instruction.shapes[0].size
        return 0


def terms_of(computation: Computation, instruction: Instruction) -> int:
    """Returns the number of terms of each sum of an instruction; 0 if it adds nothing or that is unknown."""
    shapes = operand_shapes(computation, instruction)
    if instruction.opcode == "dot" or "gemm_backend_config" in instruction.config:
        return _extent(shapes[0], _contracted(instruction)) if shapes else 0
    if len(shapes) > 1 and (instruction.opcode == "convolution" or instruction.target.startswith("__cudnn$conv")):
        kernel = instruction.attributes.get("dim_labels", "").partition("_")[2].partition("->")[0]
        return shapes[1].size // max(_extent(shapes[1], (kernel.find("o"),)), 1)
    if instruction.opcode == "reduce" and shapes:
        return _extent(shapes[0], instruction.integers("dimensions"))
    if instruction.opcode == "reduce-window":
        window = _WINDOW.search(instruction.attributes.get("window", ""))
        return math.prod(map(int, window.group(1).split("x"))) if window else 0
    return 0


def operand_shapes(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """Returns the first array of each operand."""
    return tuple(i.shapes[0] for i in computation.operands(instruction) if i.shapes)


def _count(computation: Computation, instruction: Instruction, terms: int) -> int:
    if not instruction.is_float:
        return 0
    if instruction.opcode == "reduce":
        return operand_shapes(computation, instruction)[0].size
    return instruction.shapes[0].size * terms * (1 if instruction.opcode == "reduce-window" else 2)


def _attention(computation: Computation, instruction: Instruction) -> int:
    """Counts two products per score in the forward pass, and five in the backward pass."""
    scores = instruction.config["cudnn_fmha_backend_config"].get("intermediate_tensor_shape", {}).get("dimensions", ())
    shapes = operand_shapes(computation, instruction)
    products = 5 if "Backward" in instruction.target else 2
    return 2 * products * math.prod(map(int, scores)) * shapes[0].dims[-1] if scores and shapes else 0


def _contracted(instruction: Instruction) -> tuple[int, ...]:
    if instruction.opcode == "dot":
        return instruction.integers("lhs_contracting_dims")
    gemm: dict[str, Any] = instruction.config["gemm_backend_config"]
    return tuple(map(int, gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())))


def _extent(shape: Shape, dims: tuple[int, ...]) -> int:
    return math.prod(shape.dims[d] for d in dims if 0 <= d < len(shape.dims)) if dims else 0


def _trips(instruction: Instruction) -> int:
    """Returns how often an instruction runs its computations; combiners of sums count with the sums."""
    if instruction.opcode != "while":
        return int(instruction.opcode in ("fusion", "call", "conditional", "async-start", "custom-call"))
    known = instruction.config.get("known_trip_count", {})
    return int(known.get("n", 1)) if isinstance(known, dict) else 1
