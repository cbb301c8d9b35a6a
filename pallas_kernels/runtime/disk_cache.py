"""What was found out on this machine, remembered between processes beside JAX's compilation cache.

Which form of a product keeps a contract's order is found out by comparison, once for each shape and process. Where JAX
has a folder for its compilation cache (`jax_compilation_cache_dir`, not set by default), what was found is kept in the
subfolder `bijax` of it, and the next process reads it. An entry holds for one processor with its instructions, number
of threads, versions of JAX and jaxlib, `XLA_FLAGS`, `jax_disable_most_optimizations` and source of this package;
anything else is compared anew.

`BIJAX_LOWERING_CACHE=off` in the environment turns it off, with the caches of `bijax.core.lowering_cache`.
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

SWITCH = "BIJAX_LOWERING_CACHE"
"""Name of the environment variable that turns the caches off."""

_PROCESSOR = Path("/proc/cpuinfo")
_DIGEST = hashlib.sha256().digest_size
_PER_CORE = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "physical id", "bogomips", "BogoMIPS")


def remembered[**P](compare: Callable[P, bool]) -> Callable[P, bool]:
    """Keeps what a comparison finds, for other processes on this machine.

    Args:
        compare: A function of values whose `repr` tells them apart; its result depends on them and the machine alone.

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
    """Returns whether anything may be kept: what is lowered, what is compiled ahead, what comparisons find.

    Raises:
        ValueError: If the environment variable is neither "on" nor "off".
    """
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ValueError(f"expected the environment variable {SWITCH} to be on or off, got {value!r}.")
    return value == "on"


def recall(question: str) -> bytes | None:
    """Returns what was kept as the answer to a question on this machine; None if nothing was.

    Args:
        question: Any text; everything that the answer depends on, but for the machine and this package.
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
    """Keeps the answer to a question for other processes on this machine, if JAX has a folder for its cache."""
    folder = _folder()
    if folder is None:
        return
    header = _header(question)
    with contextlib.suppress(OSError):  # a folder that cannot be written to is no reason to fail
        _write(folder / hashlib.sha256(header).hexdigest(), header + hashlib.sha256(answer).digest() + answer)


def source_digest(package: Path) -> str:
    """Returns a hash of the sources of a package: their names, sizes and times, by which Python tells changes too."""
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
    # Without them it is other machine code, which may have other bits.
    optimized = not jax.config.read("jax_disable_most_optimizations")
    return f"{question}\n{_machine()}{'' if optimized else ', not optimized'}\n".encode()


def _folder() -> Path | None:
    """Returns where entries are kept; None where they are not."""
    base = jax.config.jax_compilation_cache_dir
    if not is_on() or not base or "://" in base or not jax.config.jax_enable_compilation_cache or not _machine():
        return None
    return Path(base) / "bijax"


@functools.cache
def _machine() -> str:
    """Returns what the results depend on besides the question; nothing if the processor does not tell its kind."""
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
        source_digest(Path(__file__).parents[2]),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _write(path: Path, entry: bytes) -> None:
    """Writes a file so that no other process sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(entry)
    os.replace(file.name, path)
