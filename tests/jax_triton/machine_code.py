"""What Triton's compiler makes of recorded launches: machine code for any NVIDIA GPU, on a machine without one."""

import dataclasses
import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import pytest

from pallas_kernels.parts.jax_triton.launch import Launch, recorded_launches
from pallas_kernels.target import Target

TARGETS: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
NAMES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "int8": "i8",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}

_SET_ASIDE: Final = 24
"""Bytes of a thread that a program may keep in local memory; a sum that is not in registers takes more."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler: pip install triton"
)


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """The machine code of a kernel, and what it occupies.

    Attributes:
        shared: Bytes of shared memory of a program.
        registers: Registers of a thread.
        local: Bytes of local memory of a thread: spilled registers and arrays.
        ptx: The virtual instructions.
        ttgir: The program with the layouts of its tensors.
        sass: The machine's instructions.
    """

    shared: int
    registers: int
    local: int
    ptx: str
    ttgir: str
    sass: str

    def count(self, pattern: str) -> int:
        """Returns the number of instructions of the machine code that match a regular expression."""
        return len(re.findall(pattern, self.sass))


def launches_of(function: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> list[Launch]:
    """Returns the launches of a function of arrays, which is only traced."""
    with recorded_launches() as found:
        jax.eval_shape(function, *arrays)
    return found


def compiled(launch: Launch) -> MachineCode:
    """Compiles a launch for its target."""
    return _compiled(dataclasses.replace(launch, grid=(1, 1, 1), results=tuple(map(_dtype, launch.results))))


def check_resources(code: MachineCode, target: Target) -> None:
    """Checks that a program fits on a multiprocessor and keeps its values in registers.

    The compiler of Triton 3.9 stores a few pointers before a loop and loads them after it, so that more programs fit.
    """
    assert code.shared <= target.shared_memory, f"{code.shared} bytes of shared memory on {target}"
    assert code.registers <= 255
    assert code.local <= _SET_ASIDE, f"{code.local} bytes of local memory on {target}"


def assembled(ptx: bytes, target: Target) -> str:
    """Returns the machine's instructions of PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_bytes(ptx)
        accelerated = "a" if target.generation >= 90 else ""
        name = Path(get_ptxas(target.generation).path).name
        _tool(name, f"-arch={target}{accelerated}", str(source), "-o", str(cubin))
        return _tool("cuobjdump", "-sass", str(cubin))


@functools.cache
def _compiled(launch: Launch) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.parts.jax_triton.library import pinned_settings

    names = list(launch.kernel.arg_names)
    types = [NAMES[a] if isinstance(a, str) else "i32" for a in launch.arguments]
    types += [NAMES[r.dtype.name] for r in launch.results]
    is_size = [isinstance(a, int) for a in launch.arguments] + [False] * len(launch.results)
    signature = {n: t if size else f"*{t}" for n, t, size in zip(names, types, is_size, strict=False)}
    constants = dict(launch.constants) | {n: 1 for n, a in zip(names, launch.arguments, strict=False) if a == 1}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, size in enumerate(is_size) if not size}
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": launch.fuses}
    with pinned_settings():
        code = triton.compile(
            ASTSource(launch.kernel, signature, constants, aligned),
            target=GPUTarget("cuda", launch.target.generation, 32),
            options=options,
        )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        usage, sass = (_tool("cuobjdump", option, str(cubin)) for option in ("-res-usage", "-sass"))
    (registers,) = re.findall(r"REG:(\d+)", usage)
    local = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    return MachineCode(code.metadata.shared, int(registers), local, code.asm["ptx"], code.asm["ttgir"], sass)


def _tool(name: str, *options: str) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    command = [str(tools / name), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": str(tools)}).stdout


def _dtype(result: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), result.dtype)
