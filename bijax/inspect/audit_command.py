"""The command `bijax audit`."""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bijax import hlo
from bijax.inspect.annotations import annotations
from bijax.inspect.audit import audit
from bijax.inspect.audit_report import Audit
from bijax.transform.rules.registry import PLATFORMS

DESCRIPTION = """\
Says of every operation of a function whether its bits can depend on the size of the batch, and why: which operations
are invariant by construction, which bijax.invariant replaces, which are left to XLA. The function is traced, not
run."""
EPILOG = """\
exit code: 0 if nothing is variant, 1 if something is, 2 if the audit could not be made"""


class AuditError(Exception):
    """The command cannot run with these arguments.

    The message says what was expected, what was passed and what to do; the command line shows it without a traceback.
    """


def add_audit_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `audit` to the commands."""
    parser = commands.add_parser(
        "audit",
        help="list the operations of a function whose bits can depend on the batch",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "function", nargs="?", metavar="MODULE:FUNCTION", help="the function; modules are found from here, too"
    )
    what.add_argument(
        "--hlo", type=Path, metavar="FILE", help="read the HLO of a compiled program instead, such as an XLA dump"
    )
    parser.add_argument(
        "--args",
        metavar="MODULE:ARGS_FUNCTION",
        help="a function that returns the arguments: a tuple, or a dict of keyword arguments; arrays or "
        "jax.ShapeDtypeStruct (default: no arguments)",
    )
    parser.add_argument(
        "--batch-axis",
        type=_axes,
        metavar="AXIS",
        help="follow the rows and list where they meet: the axis of the batch in all arguments, such as 0, or one for"
        " each, such as none,0 (default: rows are not followed)",
    )
    parser.add_argument("--platform", choices=PLATFORMS, help="platform to audit for (default: the present one)")
    parser.add_argument(
        "--architecture",
        metavar="SM",
        help="that of the GPU, such as sm_90, for --platform cuda",
    )
    parser.add_argument("--compiled", action="store_true", help="look at the compiled program, too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--github", action="store_true", help="print annotations for GitHub Actions, then the verdict")


def _axes(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if part.strip().lower() == "none" else int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected an axis such as 0, or one for each argument such as none,0; got {text!r}"
        ) from None


def run_audit(parsed: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        AuditError: If a file, module, function or its arguments cannot be loaded, or the function cannot be traced or
            compiled.
    """
    result = _read(parsed.hlo, parsed) if parsed.hlo else _audit(parsed)
    if parsed.json:
        print(json.dumps(result.to_json(), indent=2))
    elif parsed.github:
        print("\n".join(annotations(result)))
    else:
        _show(result)
    return 0 if result.invariant else 1


def _read(path: Path, parsed: argparse.Namespace) -> hlo.Report:
    if parsed.args or parsed.compiled or parsed.batch_axis is not None:
        raise AuditError(
            "--hlo reads a program that is compiled already; --args, --batch-axis and --compiled are for functions"
        )
    try:
        return hlo.inspect_text(path.read_text(encoding="utf-8"), platform=parsed.platform)
    except (OSError, ValueError) as error:
        raise AuditError(f"--hlo {path}: {error}") from error


def _audit(parsed: argparse.Namespace) -> Audit:
    with _modules_from_here():
        function = _load(parsed.function, "MODULE:FUNCTION")
        given: Any = ()
        if parsed.args:
            make = _load(parsed.args, "--args")
            with _reported(f"--args {parsed.args}"):
                given = make()
        if not isinstance(given, (tuple, list, dict)):
            raise AuditError(
                f"--args {parsed.args}: expected a function that returns a tuple of arguments, or a dict of keyword"
                f" arguments; it returned {type(given).__name__}"
            )
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        _check_arguments(function, parsed, args, kwargs)
        with _reported(f"{parsed.function} cannot be audited"):
            options = {name: getattr(parsed, name) for name in ("compiled", "platform", "architecture")}
            axes = parsed.batch_axis
            if isinstance(axes, tuple) and len(axes) == 1:  # one entry stands for all arguments
                (axes,) = axes
            return audit(function, *args, batch_axes=axes, **options, **kwargs)


def _check_arguments(
    function: Callable[..., Any], parsed: argparse.Namespace, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Checks that a function can be called with the arguments, as far as its signature shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = f"those that {parsed.args} returns" if parsed.args else "none"
        raise AuditError(
            f"{parsed.function} takes the arguments {signature}, and was given {given}: {error}; name a function that"
            " returns them with --args MODULE:ARGS_FUNCTION"
        ) from error


def _load(name: str, option: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise AuditError(f"{option}: expected MODULE:FUNCTION, such as my.model:apply, got {name!r}")
    with _reported(f"{option} {name}"):
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    if not callable(found):
        raise AuditError(f"{option} {name}: expected a function, got {type(found).__name__}")
    return found


@contextlib.contextmanager
def _modules_from_here() -> Iterator[None]:
    """Makes modules of the current folder importable, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have edited the path
            sys.path.remove("")


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Converts whatever the user's code raises, even a `sys.exit`, into an error of the command."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise AuditError(f"{what}: {type(error).__name__}: {error}") from error


def _show(result: Audit | hlo.Report) -> None:
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print(result)  # a piped table stays wide, for other programs
        return
    from rich.console import Console

    Console().print(result)
