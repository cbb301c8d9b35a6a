"""Whether two states of the sources lower the same programs: StableHLO and kernel modules, without locations.

    PYTHONPATH=. python -m tests.goldens.lowered --json before.json       in the one tree
    PYTHONPATH=. python -m tests.goldens.lowered --compare before.json    in the other one

A refactoring changes neither. The programs are the golden cases and random ones, for a CPU and for GPUs, which the
machine need not have. Names of functions do not count. A program that is not lowered counts by the type of its error.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from rich.console import Console
from rich.progress import track

import bijax
from tests.fuzz.programs import Fuzz
from tests.goldens.cases import cases

# Private modules of JAX, without types.
ir: Any = importlib.import_module("jaxlib.mlir.ir")
_DIALECTS: Final[tuple[Any, ...]] = tuple(
    importlib.import_module(name) for name in ("jaxlib.mosaic.python.mosaic_gpu", "jaxlib.triton.dialect")
)
TARGETS: Final = ("cpu", "sm_90", "sm_80")
_KERNELS: Final = ("module", "ir")  # the fields of a custom call that hold a kernel as bytecode
_CACHES_KEPT: Final = 20  # programs between two that start with empty caches, for memory's sake
_BATCH: Final = 8

Program = tuple[Callable[..., Any], tuple[Any, ...], bool]


def programs(random: int) -> dict[str, Program]:
    """Returns functions with their arrays, and whether they have 64 bits, by name."""
    found: dict[str, Program] = {name: (case.function, case.arrays, case.wide) for name, case in cases().items()}
    for number in range(random):
        fuzz = Fuzz(number // 3, kernels=number % 3 > 0, guests=number % 3 == 2)
        found[f"random {number}"] = fuzz.batched(), _arguments(fuzz), fuzz.dtype == "float64"
    return found


def _arguments(fuzz: Fuzz) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = []
    for axis, shape in zip(fuzz.axes, fuzz.shapes, strict=False):
        batched = list(shape)
        batched.insert(axis, _BATCH)
        shapes.append(jax.ShapeDtypeStruct(tuple(batched), jnp.dtype(fuzz.dtype)))
    return tuple(shapes)


def digest(program: Program, target: str) -> str:
    """Returns a hash of a lowered program.

    Args:
        program: A function, its arrays, whether they have 64 bits.
        target: "cpu", or the architecture of a GPU.
    """
    function, arrays, wide = program
    platform, block = ("cpu", contextlib.nullcontext()) if target == "cpu" else ("cuda", bijax.lowering_for(target))
    with jax.enable_x64(wide), block, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            lowered = jax.jit(bijax.invariant(function)).trace(*arrays).lower(lowering_platforms=(platform,))
        except Exception as error:
            return type(error).__name__
    return hashlib.sha256(text(lowered.compiler_ir("stablehlo")).encode()).hexdigest()[:16]


def text(module: Any) -> str:
    """Returns a module as text, with its kernels' text instead of their bytecode, and its functions numbered."""
    copy = ir.Module.parse(module.operation.get_asm(binary=True), module.context)
    with copy.context:
        for operation in _operations(copy.operation):
            if "mhlo.backend_config" in operation.attributes:
                operation.attributes["mhlo.backend_config"] = _readable(operation.attributes["mhlo.backend_config"])
    return _numbered(copy.operation.get_asm(enable_debug_info=False))


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _readable(config: Any) -> Any:
    if not isinstance(config, ir.DictAttr):
        return config
    fields = {named.name: named.attr for named in config}
    for name in _KERNELS:
        if name in fields:
            fields.pop("kernel_hash", None)  # of the bytecode, locations included
            fields[name] = ir.StringAttr.get(_kernel(fields[name].value_bytes))
    return ir.DictAttr.get(fields)


def _kernel(bytecode: bytes) -> str:
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        context.load_all_available_dialects()
        for dialect in _DIALECTS:
            dialect.register_dialect(context)
        return _numbered(ir.Module.parse(bytecode, context).operation.get_asm(enable_debug_info=False))


def _numbered(module: str) -> str:
    """Returns the text of a module in which symbols have numbers in the order in which they come."""
    numbers: dict[str, str] = {}
    symbols = re.sub(r'(?<=@)[\w.$-]+|(?<=@)"[^"]*"', lambda m: numbers.setdefault(m[0], f"f{len(numbers)}"), module)
    names = {name.strip('"') for name in numbers}
    return re.sub(r'(?<=name = ")[\w.$-]+(?=")', lambda m: "f" if m[0] in names else m[0], symbols)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the hashes to")
    parser.add_argument("--compare", type=Path, help="file of another state to compare with")
    parser.add_argument("--only", default="", help="regular expression that names of programs hold")
    parser.add_argument("--random", type=int, default=150, help="how many random programs")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    arguments = parser.parse_args()
    before = json.loads(arguments.compare.read_text()) if arguments.compare else {}
    found: dict[str, str] = {}
    differ: list[str] = []
    chosen = [(n, p) for n, p in programs(arguments.random).items() if re.search(arguments.only, n)]
    for i, (name, program) in enumerate(track(chosen, "programs", console=Console(stderr=True))):
        for target in arguments.targets:
            key = f"{target} | {name}"
            found[key] = digest(program, target)
            if arguments.compare and found[key] != before.get(key):
                differ.append(key)
                print(f"differs: {key}: {before.get(key, 'not there')} before, {found[key]} now", flush=True)
        if i % _CACHES_KEPT == 0:
            jax.clear_caches()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    errors = sum(not re.fullmatch(r"[0-9a-f]{16}", value) for value in found.values())
    print(f"{len(found)} lowered programs, {errors} of them errors, {len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
