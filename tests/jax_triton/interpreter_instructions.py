"""What Triton's interpreter lacks: instructions of the machine, functions of libdevice, products of bfloat16."""

import inspect
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pallas_kernels.parts import ptx

_INSTRUCTIONS: Final[dict[str, Callable[..., np.ndarray]]] = {
    "mul.rn.f32": np.multiply,
    "div.rn.f32": np.divide,
    "fma.rn.f32": lambda a, b, c: a.astype(np.float64) * b + c,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.ftz.f32": np.log2,
}


def xla_silu(z: np.ndarray) -> np.ndarray:
    """Computes z / (1 + exp(-z)) in the steps of XLA."""
    z = np.asarray(z, np.float32)
    return z * (np.float32(1) / (np.float32(1) + np.exp(-z)))


_SEQUENCES: Final[dict[str, Callable[..., np.ndarray]]] = {
    ptx.EXPONENTIAL: np.exp,
    ptx.PLAIN_EXPONENTIAL: np.exp,
    ptx.SILU: lambda z: z / (1 + np.exp(-z)),
    ptx.XLA_SILU: xla_silu,
    ptx.INTEGER_QUOTIENT: lambda h, power, divisor, _: np.rint(h * power / divisor).astype(np.int32),
    ptx.FLOAT_QUOTIENT: lambda h, power, divisor, _: (h * power / divisor + np.float32(0)).view(np.int32),
}
_FUNCTIONS: Final[dict[str, Callable[..., np.ndarray]]] = {"tanh": np.tanh, "log2": np.log2, "log": np.log}


def interpret_instructions() -> None:
    """Teaches the interpreter of this process what the kernels need."""
    from triton.language import core as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    class Results:
        def __init__(self, *handles: Any) -> None:
            self.handles = handles

        def get_result(self, index: int) -> Any:
            return self.handles[index]

    def halves(asm: str, x: Any) -> Any:
        """The upper and lower halves of a product by a constant (`parts.jax_triton.philox`)."""
        (factor,) = re.findall(r"mul\.wide\.u32 p, \$2, (0x[0-9A-F]+);", asm)
        wide = x.data.astype(np.uint64) * np.uint64(int(factor, 16))
        return Results(*(TensorHandle(part.astype(np.uint32), tl.uint32) for part in (wide >> np.uint64(32), wide)))

    def computed(function: Callable[..., np.ndarray], operands: list[Any]) -> Any:
        with np.errstate(all="ignore"):
            found = function(*(x.data for x in operands))
        if found.dtype == np.int32:
            return TensorHandle(found, tl.int32)
        return TensorHandle(np.asarray(found, np.float32), tl.float32)

    # Options of loads and stores, of which Triton's versions have different ones; `self` and three operands come first.
    of_load, of_store = (
        len(inspect.signature(f).parameters) - 4
        for f in (InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store)
    )

    def places(addresses: Any) -> Any:
        return TensorHandle(addresses.data.astype(np.uint64), tl.pointer_type(tl.float32))

    def loaded(builder: Any, addresses: Any, some: Any) -> Any:
        mask, other = TensorHandle(some.data != 0, tl.int1), TensorHandle(np.zeros(some.data.shape, "f4"), tl.float32)
        return builder.create_masked_load(places(addresses), mask, other, *[None] * of_load)

    def store(builder: Any, addresses: Any, x: Any) -> None:
        mask = TensorHandle(np.ones(x.data.shape, bool), tl.int1)
        builder.create_masked_store(places(addresses), x, mask, *[None] * of_store)

    def create_inline_asm(builder: Any, asm: str, constraints: str, operands: list[Any], *_: Any) -> Any:
        if "ld.global.f32" in asm:
            return Results(loaded(builder, *operands))
        if "st.global.f32" in asm:
            store(builder, *operands)
            return Results(TensorHandle(np.zeros(operands[1].data.shape, np.int32), tl.int32))
        if asm in _SEQUENCES:
            return Results(computed(_SEQUENCES[asm], operands))
        if "mul.wide.u32" in asm:
            return halves(asm, operands[0])
        instruction = asm.split()[0]
        return Results(operands[0] if instruction == "mov.b32" else computed(_INSTRUCTIONS[instruction], operands))

    def of_libdevice(function: Callable[..., np.ndarray]) -> Callable[..., Any]:
        return lambda x: tl.tensor(computed(function, [x.handle]), x.type)

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        """One product after the other: the order of `np.matmul` depends on the shape and on the processor."""
        left, right = (numbers(x) for x in (a, b))
        total = np.array(d.data, np.float32)
        with np.errstate(all="ignore"):
            for k in range(left.shape[-1]):
                total += left[..., k, None] * right[..., k, None, :]
        return TensorHandle(total, d.dtype.scalar)

    def numbers(x: Any) -> np.ndarray:
        if x.dtype.scalar != tl.bfloat16:
            return np.asarray(x.data, np.float32)
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    builder: Any = InterpreterBuilder
    builder.create_inline_asm = create_inline_asm
    builder.create_dot = create_dot
    for name, function in _FUNCTIONS.items():
        setattr(libdevice, name, of_libdevice(function))
