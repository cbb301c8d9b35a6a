"""Results of comparisons on this machine, remembered between processes beside JAX's compilation cache.

Which form of a product keeps a contract's order is found out by comparison, once for each shape and process. Where JAX
has a folder for its compilation cache (`jax_compilation_cache_dir`, not set by default), what was found is kept in the
subfolder `bijax` of it, and the next process reads it. An entry holds for one processor with its instructions, number
of threads, versions of JAX and jaxlib, `XLA_FLAGS` and source of this package; anything else is compared anew.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib.version

_PROCESSOR = Path("/proc/cpuinfo")
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
        folder = _folder()
        if folder is None:
            return compare(*args, **kwargs)
        question = f"{compare.__module__}.{compare.__qualname__} {args!r} {sorted(kwargs.items())!r}\n{_machine()}\n"
        path = folder / hashlib.sha256(question.encode()).hexdigest()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
            if text in (f"{question}True\n", f"{question}False\n"):
                return text.endswith("True\n")
        found = compare(*args, **kwargs)
        with contextlib.suppress(OSError):  # a folder that cannot be written to is no reason to fail
            _write(path, f"{question}{found}\n")
        return found

    return run


def _folder() -> Path | None:
    """Returns where entries are kept; None where they are not."""
    base = jax.config.jax_compilation_cache_dir
    if not base or "://" in base or not jax.config.jax_enable_compilation_cache or not _machine():
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
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        source.update(path.read_bytes())
    facts = (
        processor,
        threads,
        jax.__version__,
        jaxlib.version.__version__,
        os.environ.get("XLA_FLAGS", ""),
        source.hexdigest(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Writes a file so that no other process sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
