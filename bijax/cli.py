"""The command `bijax`."""

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence

from bijax.demo.arguments import Arguments, add_demo_parser
from bijax.demo.errors import DemoError
from bijax.determinism.command import DeterminismError, add_determinism_parser, run_determinism
from bijax.inspect.audit_command import AuditError, add_audit_parser, run_audit
from bijax.inspect.kernels_command import KernelsError, add_kernels_parser, run_kernels
from bijax.server.command import add_serve_parser, run_serve
from bijax.server.errors import ServeError

DISTRIBUTION = "batch-invariant-jax"
DEMO_PACKAGES = ("flax", "gguf", "jinja2", "matplotlib", "rich", "safetensors", "tokenizers")
INTERRUPTED = 130  # as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the name of the program; None for those of the process.

    Returns:
        The exit code: 0 for success, 1 if a demonstration or an engine failed, an audit found something, or a test
        of determinism found more than one answer, 2 if the command could not run.

    Raises:
        SystemExit: With code 2 if the arguments are wrong, with code 0 after `--help` and `--version`.

    Example:
        >>> main(["demo", "--prompts", "99"])
        2
    """
    parser = argparse.ArgumentParser(prog="bijax", description="Batch-invariant JAX.")
    parser.add_argument("--version", action="version", version=f"bijax {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_audit_parser(commands)
    add_demo_parser(commands)
    add_kernels_parser(commands)
    add_serve_parser(commands)
    add_determinism_parser(commands)
    parsed = parser.parse_args(argv)
    try:
        match parsed.command:
            case "audit":
                return run_audit(parsed)
            case "kernels":
                return run_kernels(parsed)
            case "test-deterministic":
                return run_determinism(parsed)
            case "serve":
                return run_serve(parsed)
            case _:
                return _demo(parsed)
    except (AuditError, DemoError, DeterminismError, KernelsError, ServeError) as error:
        print(f"bijax {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bijax {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _demo(parsed: argparse.Namespace) -> int:
    arguments = Arguments.from_namespace(parsed)
    missing = [name for name in DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"the demo needs packages that are not installed: {', '.join(missing)}; "
            f"install them with `pip install '{DISTRIBUTION}[demo]'`"
        )
    # Here, because it imports those packages.
    from bijax.demo.run import run_demo

    return run_demo(arguments)


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
