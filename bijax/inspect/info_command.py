"""The command `bijax info`: what a bug report needs."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import textwrap
from typing import Any, Final

import jax

from bijax.core.architecture import target_for
from pallas_kernels import registry
from pallas_kernels.target import Target

_PACKAGES: Final = (
    "batch-invariant-jax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "scipy", "flax",
)  # fmt: skip


def add_info_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `info` to the commands."""
    parser = commands.add_parser(
        "info",
        help="print versions, devices, and which kernels serve this machine, for bug reports",
        description="Prints the versions of packages, the platform, the devices that JAX sees, the settings that"
        " matter, and the backend that serves each operation on them.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_info(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    found = information()
    print(json.dumps(found, indent=2) if parsed.json else _text(found))
    return 0


def information() -> dict[str, Any]:
    """Returns versions, machine, devices, settings and the backends that serve operations."""
    try:
        backend, devices = jax.default_backend(), [_device(d) for d in jax.devices()]
    except (RuntimeError, AssertionError) as error:  # a driver that is missing or too old, or JAX_PLATFORMS
        backend, devices = "", [f"none, JAX raises {type(error).__name__}: {error}"]
    name = "cuda" if backend == "gpu" else backend
    target = target_for(name) if name in ("cpu", "cuda") else None
    unsupported = f"{name}: not supported, programs raise UnsupportedError" if name else "none"
    return {
        "versions": {package: v for package in _PACKAGES if (v := _version(package))}
        | {"python": platform.python_version()},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
        },
        "devices": devices,
        "target": str(target) if target else unsupported,
        "settings": {
            name: os.environ[name]
            for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "BIJAX_LOWERING_CACHE")
            if name in os.environ
        },
        "served by": _served(target) if target else {},
    }


def _served(target: Target) -> dict[str, list[str]]:
    """Returns the operations by the backend whose kernels come first for them; others serve what these refuse."""
    found: dict[str, list[str]] = {}
    for operation in sorted({kernel.operation for kernel in registry.kernels()}):
        for kernel in registry.candidates(operation, target)[:1]:
            found.setdefault(kernel.backend or kernel.name.partition(":")[0], []).append(operation)
    return found


def _device(device: jax.Device) -> str:
    """Returns a device as "gpu 0: NVIDIA H200"; a CPU's kind is its platform once more."""
    name, kind = f"{device.platform} {device.id}", device.device_kind
    return name if kind == device.platform else f"{name}: {kind}"


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _processor() -> str:
    """Returns the name of the processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(found: dict[str, Any]) -> str:
    lines = [*(f"{name} {version}" for name, version in found["versions"].items())]
    machine = found["machine"]
    lines += [f"{machine['system']}, {machine['processor']}, {machine['cores']} cores"]
    lines += [f"device: {device}" for device in found["devices"]]
    lines += [f"target: {found['target']}"]
    lines += [f"{name}={value}" for name, value in found["settings"].items()]
    for backend, names in found["served by"].items():
        lines += textwrap.wrap(f"served by {backend}: {', '.join(names)}", 100, subsequent_indent="    ")
    return "\n".join(lines)
