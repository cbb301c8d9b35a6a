"""The command `bijax audit`."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from bijax import hlo
from bijax.inspect.annotations import annotations
from bijax.inspect.audit import audit
from bijax.inspect.audit_report import Audit
from bijax.inspect.load import (
    CommandError,
    add_function_arguments,
    called,
    check_architecture,
    modules_from_here,
    reported,
)
from bijax.transform.rules.registry import PLATFORMS

DESCRIPTION = """\
Reports, for every operation of a function, whether its bits can depend on the size of the batch, and why: which
operations are invariant by construction, which bijax.invariant replaces, which are left to XLA. The function is
traced, not run."""
EPILOG = """\
exit code: 0 if nothing is variant, 1 if something is, 2 if the audit could not be made"""


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
    add_function_arguments(parser)
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
        help="architecture of the GPU, such as sm_90, for --platform cuda",
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
        CommandError: If a file, module, function or its arguments cannot be loaded, or the function cannot be traced or
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
        raise CommandError(
            "--hlo reads a program that is compiled already; --args, --batch-axis and --compiled are for functions"
        )
    try:
        return hlo.inspect_text(path.read_text(encoding="utf-8"), platform=parsed.platform)
    except (OSError, ValueError) as error:
        raise CommandError(f"--hlo {path}: {error}") from error


def _audit(parsed: argparse.Namespace) -> Audit:
    with modules_from_here():
        function, args, kwargs = called(parsed.function, parsed.args)
        if parsed.compiled:
            check_architecture(parsed.platform, parsed.architecture)
        with reported(f"{parsed.function} cannot be audited"):
            options = {name: getattr(parsed, name) for name in ("compiled", "platform", "architecture")}
            axes = parsed.batch_axis
            if isinstance(axes, tuple) and len(axes) == 1:  # one entry applies to all arguments
                (axes,) = axes
            return audit(function, *args, batch_axes=axes, **options, **kwargs)


def _show(result: Audit | hlo.Report) -> None:
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print(result)  # a piped table stays wide, for other programs
        return
    from rich.console import Console

    Console().print(result)
