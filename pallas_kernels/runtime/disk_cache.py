"""A disk cache of verification results for this machine, next to JAX's compilation cache.

Whether a candidate program of a product keeps the contract's order is determined by comparison, once for each shape
and process. If JAX has a compilation cache directory (`jax_compilation_cache_dir`, not set by default), the results
are cached in its subdirectory `bijax` for later processes. An entry is valid for one processor and its instruction
sets, number of threads, JAX and jaxlib versions, `XLA_FLAGS`, `jax_disable_most_optimizations` and source of this
package; otherwise the comparison is repeated.

`BIJAX_LOWERING_CACHE=off` in the environment disables it, along with the caches of `bijax.core.lowering_cache`.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jaxlib.version

from pallas_kernels.runtime.compiler_options import is_optimized

SWITCH = "BIJAX_LOWERING_CACHE"
"""Name of the environment variable that disables the caches."""

_PACKAGE = Path(__file__).parents[1]
_PROCESSOR = Path("/proc/cpuinfo")
_DIGEST = hashlib.sha256().digest_size
_PER_CORE = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "physical id", "bogomips", "BogoMIPS")


def remembered[**P](compare: Callable[P, bool]) -> Callable[P, bool]:
    """Caches the results of a comparison for other processes on this machine.

    Args:
        compare: A function of values with distinct `repr`; its result depends only on them and the machine.

    Example:
        >>> @remembered
        ... def is_even(number: int) -> bool:
        ...     return number % 2 == 0
        >>> is_even(4)
        True
    """

    @functools.wraps(compare)
    def run(*args: P.args, **kwargs: P.kwargs) -> bool:
        question = f"{compare.__module__}.{compare.__qualname__} {args!r} {sorted(kwargs.items())!r}"
        known = recall(question)
        if known in (b"True", b"False"):
            return known == b"True"
        found = compare(*args, **kwargs)
        keep(question, str(found).encode())
        return found

    return run


def is_on() -> bool:
    """Returns whether caching is enabled, for lowered modules, ahead-of-time compiled programs and comparisons.

    Raises:
        ValueError: If the environment variable is neither "on" nor "off".
    """
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ValueError(f"expected the environment variable {SWITCH} to be on or off, got {value!r}.")
    return value == "on"


def recall(question: str) -> bytes | None:
    """Returns the cached answer to a question on this machine; None if there is no entry.

    Args:
        question: Any text; it includes everything that the answer depends on, except for the machine and this package.
    """
    folder = _folder()
    if folder is None:
        return None
    header = _header(question)
    with contextlib.suppress(OSError):
        entry = (folder / hashlib.sha256(header).hexdigest()).read_bytes()
        answer = entry[len(header) + _DIGEST :]
        if entry.startswith(header + hashlib.sha256(answer).digest()):
            return answer
    return None


def keep(question: str, answer: bytes) -> None:
    """Caches the answer to a question for other processes on this machine, if JAX has a cache directory."""
    folder = _folder()
    if folder is None:
        return
    header = _header(question)
    with contextlib.suppress(OSError):  # an unwritable directory is not an error
        _write(folder / hashlib.sha256(header).hexdigest(), header + hashlib.sha256(answer).digest() + answer)


def source_digest(package: Path) -> str:
    """Returns a hash of a package's source files: names, sizes and times, as Python uses to detect changes."""
    facts = sorted(_facts(str(package), ""))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _facts(folder: str, inside: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                state = entry.stat()
                yield inside + entry.name, state.st_size, state.st_mtime_ns
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _facts(entry.path, f"{inside}{entry.name}/")


def _header(question: str) -> bytes:
    # Without optimizations the machine code differs, and its bits may differ.
    return f"{question}\n{_machine()}{'' if is_optimized() else ', not optimized'}\n".encode()


def _folder() -> Path | None:
    """Returns the cache directory; None if caching is disabled."""
    base = jax.config.jax_compilation_cache_dir
    if not is_on() or not base or "://" in base or not jax.config.jax_enable_compilation_cache or not _machine():
        return None
    return Path(base) / "bijax"


@functools.cache
def _machine() -> str:
    """Returns a hash of everything else that results depend on; empty if the processor cannot be identified."""
    try:
        lines = _PROCESSOR.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    processor = [line for line in lines if line.partition("\t")[0].partition(":")[0].strip() not in _PER_CORE]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = (
        processor,
        threads,
        jax.__version__,
        jaxlib.version.__version__,
        os.environ.get("XLA_FLAGS", ""),
        source_digest(_PACKAGE),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _write(path: Path, entry: bytes) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(entry)
    os.replace(file.name, path)
