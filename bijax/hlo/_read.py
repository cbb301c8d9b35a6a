"""Reads the HLO of a function, of a lowered or compiled program, or of a text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jax.stages import Compiled, Lowered

from bijax.core.checks import check_callable
from bijax.hlo._libraries import CPU_NAMES, GPU_NAMES
from bijax.hlo._module import Module
from bijax.hlo._parse import parse
from bijax.hlo._trace import traced
from bijax.hlo._untagged import Class, untagged_classes

GPU_PLATFORMS = ("cuda", "rocm", "gpu")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that was read.

    Attributes:
        modules: Its modules, most often one.
        platform: "cpu", "gpu", another name of JAX, or "unknown".
        stage: Before or after XLA's rewrites.
        untagged: What had no tag before them; None if unknown.
    """

    modules: list[Module]
    platform: str
    stage: Literal["optimised", "lowered"]
    untagged: Callable[[], frozenset[Class]] | None = None


def read(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Reads any kind of program; see `inspect`."""
    if isinstance(program, Path):
        program = program.read_text(encoding="utf-8")
    if isinstance(program, (str, Lowered, Compiled)):
        if args or kwargs:
            raise TypeError(
                f"expected no arguments for a {type(program).__name__}, which is a program already; got {len(args)}"
                f" positional and {sorted(kwargs)}. Pass the function itself to have it compiled for the arguments."
            )
        if isinstance(program, str):
            return read_text(program, None)
        return read_lowered(program) if isinstance(program, Lowered) else _read_compiled(program, None)
    if not callable(program):
        raise TypeError(
            "expected a function, a jax.stages.Lowered or Compiled, or the text or path of HLO;"
            f" got {type(program).__module__}.{type(program).__qualname__}."
        )
    return read_lowered(traced(program, args, kwargs).lower())


def read_text(text: str, platform: str | None) -> Program:
    """Reads HLO text of a compiled program; infers the platform if it is None."""
    modules = parse(text)
    return Program(modules, _group(platform) if platform else _platform_of(modules), "optimised")


def read_lowered(lowered: Lowered) -> Program:
    """Compiles a lowered program for the present devices, and reads it."""
    return _read_compiled(lowered.compile(), _untagged(lowered))


def read_for(platform: str, program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Lowers a function for any platform of JAX, and reads the input of that platform's compiler."""
    check_callable("bijax.hlo.inspect_for", program)
    known = ("cuda", "cpu", "rocm", "tpu")
    if not isinstance(platform, str) or platform not in known:
        raise ValueError(f"bijax.hlo.inspect_for: expected the platform {' or '.join(known)}, got {platform!r}.")
    lowered = traced(program, args, kwargs).lower(lowering_platforms=(platform,))
    return Program(parse(lowered.as_text("hlo", debug_info=True)), _group(platform), "lowered", _untagged(lowered))


def _untagged(lowered: Lowered) -> Callable[[], frozenset[Class]]:
    return lambda: untagged_classes(lowered.compiler_ir("stablehlo"))


def _read_compiled(compiled: Compiled, untagged: Callable[[], frozenset[Class]] | None) -> Program:
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "expected a compiled program whose HLO the platform gives out; this one gives none. Take XLA's dump"
            " (XLA_FLAGS=--xla_dump_to=FOLDER) and pass the text of *after_optimizations.txt."
        )
    executable = compiled.runtime_executable()
    modules = parse(text)
    platform = _platform_of(modules) if executable is None else _group(executable.local_devices()[0].platform)
    return Program(modules, platform, "optimised", untagged)


def _group(platform: str) -> str:
    return "gpu" if platform in GPU_PLATFORMS else platform


def _platform_of(modules: list[Module]) -> str:
    names = {name for m in modules for _, i in m for name in (i.target, str(i.fusion_config.get("kind", ""))) if name}
    if any(map(GPU_NAMES.search, names)):
        return "gpu"
    cpu = any(map(CPU_NAMES.search, names)) or any(
        "outer_dimension_partitions" in i.config for m in modules for _, i in m
    )
    return "cpu" if cpu else "unknown"
