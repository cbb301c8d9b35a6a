"""Functions and arguments that a command names on the command line."""

import argparse
import contextlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax

from bijax.hlo._frames import short_line, user_line

_STANDARD_LIBRARY: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


class CommandError(Exception):
    """A command cannot run with these arguments.

    The message says what was expected, what was passed and what to do; the command line shows it without a traceback.
    """


def add_function_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the arguments of the function."""
    parser.add_argument(
        "--args",
        metavar="MODULE:ARGS_FUNCTION",
        help="a function that returns the arguments: a tuple, or a dict of keyword arguments; arrays or "
        "jax.ShapeDtypeStruct (default: no arguments)",
    )


def called(function: str, args: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a function and its arguments.

    Args:
        function: "MODULE:FUNCTION".
        args: "MODULE:ARGS_FUNCTION", or None for no arguments.

    Raises:
        CommandError: If one cannot be loaded, or the function cannot be called with the arguments.
    """
    found = _load(function, "MODULE:FUNCTION")
    given: Any = ()
    if args:
        make = _load(args, "--args")
        with reported(f"--args {args}"):
            given = make()
    if not isinstance(given, (tuple, list, dict)):
        raise CommandError(
            f"--args {args}: expected a function that returns a tuple of arguments, or a dict of keyword arguments; it"
            f" returned {type(given).__name__}"
        )
    positional, named = ((), given) if isinstance(given, dict) else (tuple(given), {})
    _check_arguments(found, function, args, positional, named)
    return found, positional, named


def _check_arguments(
    function: Callable[..., Any], name: str, source: str | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Checks that a function can be called with the arguments, as far as its signature shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = f"those that {source} returns" if source else "none"
        raise CommandError(
            f"{name} takes the arguments {signature}, and was given {given}: {error}; name a function that"
            " returns them with --args MODULE:ARGS_FUNCTION"
        ) from error


def _load(name: str, option: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise CommandError(f"{option}: expected MODULE:FUNCTION, such as my.model:apply, got {name!r}")
    with reported(f"{option} {name}"):
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{option} {name}: expected a function, got {type(found).__name__}")
    return found


def check_architecture(platform: str | None, architecture: str | None) -> None:
    """Checks that the architecture of the GPU is known for which a program is lowered.

    Raises:
        CommandError: If the platform is "cuda", none is named, and this machine has no GPU.
    """
    if platform == "cuda" and architecture is None and jax.default_backend() != "gpu":
        raise CommandError(
            "--platform cuda on a machine without an NVIDIA GPU needs --architecture, since kernels and bits depend on"
            " it: sm_90 for Hopper, sm_80 for Ampere"
        )


@contextlib.contextmanager
def modules_from_here() -> Iterator[None]:
    """Makes modules of the current folder importable, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have edited the path
            sys.path.remove("")


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Converts whatever the user's code raises, even a `sys.exit`, into an error of the command."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # JAX adds a note about tracebacks, which are not shown here.
        notes = "".join(f"\n{n}" for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n)
        raise CommandError(f"{what}: {type(error).__name__}: {error}{_place(error)}{notes}") from error


def _place(error: BaseException) -> str:
    """Returns the innermost line of the user's code that an error passed through, such as " (model.py:12)"."""
    stack = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    own = [(file, line) for file, line in stack if not file.startswith(("<frozen", *_STANDARD_LIBRARY))]
    line = short_line(user_line(own))
    return f" ({line})" if line else ""
