"""Launches as kernels of XLA's own, by its custom call for PTX.

XLA prepares and initialises each call of a foreign function each time that a program runs, about 3 µs of the host, and
records it in a command buffer (CUDA graph) by capturing a stream. A kernel that comes as PTX is like one that XLA made
itself: a node of the graph with its arguments. The PTX is the one that the foreign call would have had, but the driver
compiles it, not the compiler of jaxlib; so it must not be newer than the driver. Without a driver, as where a program
is lowered for another machine, calls stay foreign.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.interpreters.mlir import ir

from pallas_kernels.parts.jax_triton.description import VARINT, fields, number_at, without_lines
from pallas_kernels.runtime.gpu import driver_version

TARGET: Final = "__gpu$xla.gpu.ptx"
_VERSIONS: Final = ((0, 11), (0, 12))
"""Versions of JAX whose XLA is known to have such calls; `tests/jax_triton/test_native_calls_gpu.py` runs them."""

_CUDA: Final = 12
_TWICE: Final = 5
"""CUDA 12.6 has the version of PTX of 12.5."""

_TYPED: Final = 4
_WARP: Final = 32
_ARRAY, _SCALARS = 1, (3, 4, 5, 6)
"""Numbers of fields of a parameter: an array, and integers of 32 and 64 bits."""


class Native(NamedTuple):
    """A kernel whose parameters are arrays alone.

    Attributes:
        name: Of the kernel in its PTX.
        ptx: With sizes as constants.
        grid: Numbers of programs.
        threads: Threads of a program.
        shared: Bytes of shared memory of a program.
    """

    name: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int
    shared: int


def are_known() -> bool:
    """Returns whether XLA is known to have such calls in this version of JAX."""
    return _VERSIONS[0] <= jax.__version_info__[:2] <= _VERSIONS[1]


def make_native(operation: Any, description: bytes) -> bool:
    """Makes a foreign call a kernel of XLA's own, if this jaxlib has such calls and the kernel needs nothing else.

    Args:
        operation: The call, a `stablehlo.custom_call`.
        description: What it passes to jaxlib's handler.

    Returns:
        Whether it did.
    """
    if not are_known():
        return False
    try:
        message = zlib.decompress(description)
    except zlib.error:
        return False
    operands, results = len(operation.operands), len(operation.results)
    kernel = native(message, operands + results)
    if kernel is None or _version_of(kernel.ptx) > newest_ptx():
        return False
    with operation.context:
        width = ir.IntegerType.get_signless(32)

        def number(n: int) -> ir.Attribute:
            return ir.IntegerAttr.get(width, n)

        sizes = dict(zip(("grid_x", "grid_y", "grid_z"), kernel.grid, strict=True))
        sizes |= {"block_x": kernel.threads, "block_y": 1, "block_z": 1, "shared_mem_bytes": kernel.shared}
        texts = {"name": kernel.name, "kernel_type": "ptx", "kernel_data": kernel.ptx}
        outputs = ir.ArrayAttr.get([number(operands + i) for i in range(results)])
        config: dict[str, ir.Attribute] = {name: ir.StringAttr.get(text) for name, text in texts.items()}
        config |= {name: number(n) for name, n in sizes.items()} | {"output_indices": outputs}
        attributes: Any = operation.attributes
        attributes["backend_config"] = ir.DictAttr.get(config)
        attributes["call_target_name"] = ir.StringAttr.get(TARGET)
        attributes["api_version"] = number(_TYPED)
        if "mhlo.backend_config" in attributes:
            del attributes["mhlo.backend_config"]
    return True


def native(description: bytes, arrays: int) -> Native | None:
    """Returns the kernel of a launch; None if it needs what XLA does not give: zeroed arrays, scratch, clusters.

    Args:
        description: A call of jaxlib's `triton.proto`, not compressed.
        arrays: Its operands and results.
    """
    call = dict(_messages(description)).get(1)
    if not isinstance(call, bytes):
        return None
    of_call = list(_messages(call))
    kernel = dict(_messages(_first(of_call, 1, b"")))
    name, ptx = (kernel.get(n, b"") for n in (1, 4))
    known = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
    if not (isinstance(name, bytes) and isinstance(ptx, bytes) and kernel.keys() <= known):
        return None
    if any(kernel.get(n, 1) != 1 for n in (7, 8, 9, 10)):
        return None
    values = _values([value for number, value in of_call if number == 5])
    if values is None or values.count(None) != arrays:
        return None
    edited = with_constants(without_lines(ptx).decode(), name.decode(), values)
    if edited is None:
        return None
    x, y, z = (_first(of_call, n, 1) for n in (2, 3, 4))
    return Native(name.decode(), edited, (x, y, z), _WARP * int(kernel[2]), int(kernel.get(3, 0)))


def with_constants(ptx: str, name: str, values: Sequence[int | None]) -> str | None:
    """Returns PTX whose kernel has the arrays of its first parameters only.

    Args:
        ptx: The program.
        name: Of its kernel.
        values: For each of the first parameters, None for an array, or the integer that takes its place. The parameters
            after these must not be used.

    Returns:
        The program; None if a parameter cannot be left out.
    """
    found = re.search(rf"\.entry {re.escape(name)}\(([^)]*)\)", ptx)
    if found is None:
        return None
    parameters = [p.strip() for p in found[1].split(",")] if found[1].strip() else []
    body = ptx[found.end() :]
    widths = {name: int(width) for width, name in re.findall(r"\.reg \.b(\d+)\s+%([a-z]+)<\d+>;", body)}
    kept = []
    for i, parameter in enumerate(parameters):
        own, value = parameter.split()[-1], values[i] if i < len(values) else 0
        if value is None:
            kept.append(parameter)
        elif i < len(values):
            load = rf"ld\.param\.([bsu])(32|64)(\s+)%([a-z]+)(\d+), \[{re.escape(own)}\];"
            body = re.sub(load, lambda m, value=value: _constant(m, value, widths), body)
        if value is not None and re.search(rf"\b{re.escape(own)}\b", body):
            return None
    if len(parameters) < len(values):
        return None
    return f"{ptx[: found.start()]}.entry {name}(\n\t{',\n\t'.join(kept)}\n){body}"


def _constant(load: re.Match[str], value: int, widths: dict[str, int]) -> str:
    """Returns the instruction that gives a register what a load of an integer would; the load itself if none is known.

    A load extends the integer to the width of its register, by its sign or by zeros; a move does not.
    """
    kind, bits, space, name, number = load.groups()
    width = widths.get(name, 0)
    if width < int(bits):
        return load[0]
    if kind != "s" and width > int(bits):
        value %= 1 << int(bits)
    return f"mov.b{width}{space}%{name}{number}, {value};"


def newest_ptx() -> tuple[int, int]:
    """Returns the newest version of PTX that the driver of this machine compiles; (0, 0) if there is none."""
    cuda = driver_version()
    return (0, 0) if cuda[0] < _CUDA else ptx_of(*cuda)


def ptx_of(major: int, minor: int) -> tuple[int, int]:
    """Returns the version of PTX that came with a version of CUDA from 12.0 on.

    Example:
        >>> ptx_of(12, 4), ptx_of(12, 9), ptx_of(13, 1)
        ((8, 4), (8, 8), (9, 1))
    """
    if major > _CUDA:
        return major - 4, minor
    return 8, minor - (minor > _TWICE)


def _version_of(ptx: str) -> tuple[int, int]:
    found = re.search(r"^\.version (\d+)\.(\d+)", ptx, re.M)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def _values(parameters: Sequence[Any]) -> list[int | None] | None:
    """Returns what `with_constants` takes; None if an array is to be zeroed or a parameter is of another kind."""
    values: list[int | None] = []
    for parameter in parameters:
        ((number, value),) = _messages(parameter)
        if number == _ARRAY and isinstance(value, bytes) and not _first(list(_messages(value)), 1, 0):
            values.append(None)
        elif number in _SCALARS and isinstance(value, int):
            values.append(value - (1 << 64) if value >> 63 else value)
        else:
            return None
    return values


def _first(messages: Sequence[tuple[int, Any]], number: int, default: Any) -> Any:
    return next((value for n, value in messages if n == number), default)


def _messages(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field."""
    for number, start, value, end in fields(message):
        kind = number_at(message, start)[0] & 7
        yield number, number_at(message, value)[0] if kind == VARINT else message[value:end]
