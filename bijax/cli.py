"""The command `bijax`. Imports JAX only when a command needs it."""

import argparse
import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from bijax.completion import CompletionError, add_completion_parser, script

DISTRIBUTION: Final = "batch-invariant-jax"
DEMO_PACKAGES: Final = ("flax", "gguf", "jinja2", "matplotlib", "rich", "safetensors", "tokenizers")
INTERRUPTED: Final = 130  # as shells report it
PIPE_CLOSED: Final = 141  # as shells report it
EPILOG: Final = """\
`bijax COMMAND --help` describes a command. Exit codes: 0 for success, 1 if a command found something, 2 if it could not
run."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, whose module is imported when it is used.

    Attributes:
        name: Its name.
        help: What it does, for the list of commands.
        module: The module of its arguments.
        add: Name of the function that adds its parser.
        run: Name of the function that runs it; empty for one in this module.
        error: Name of the exception for arguments with which it cannot run, "MODULE:CLASS".
    """

    name: str
    help: str
    module: str
    add: str
    run: str
    error: str


_INSPECT: Final = "bijax.inspect"
COMMANDS: Final = (
    Command(
        "audit",
        "list the operations of a function whose bits can depend on the batch",
        f"{_INSPECT}.audit_command",
        "add_audit_parser",
        "run_audit",
        f"{_INSPECT}.load:CommandError",
    ),
    Command(
        "contracts",
        "print the contracts that fix the bits of a function, and their fingerprint",
        f"{_INSPECT}.contracts_command",
        "add_contracts_parser",
        "run_contracts",
        f"{_INSPECT}.load:CommandError",
    ),
    Command(
        "demo",
        "show the same bits alone and in a batch, with a real model",
        "bijax.demo.arguments",
        "add_demo_parser",
        "",
        "bijax.demo.errors:DemoError",
    ),
    Command(
        "info",
        "print versions, devices, and which kernels serve this machine, for bug reports",
        f"{_INSPECT}.info_command",
        "add_info_parser",
        "run_info",
        f"{_INSPECT}.load:CommandError",
    ),
    Command(
        "kernels",
        "list the kernels, their targets and the contracts that fix their bits",
        f"{_INSPECT}.kernels_command",
        "add_kernels_parser",
        "run_kernels",
        f"{_INSPECT}.kernels_command:KernelsError",
    ),
    Command(
        "serve",
        "serve a model over HTTP, with the same bits under any load",
        "bijax.server.command",
        "add_serve_parser",
        "run_serve",
        "bijax.server.errors:ServeError",
    ),
    Command(
        "test-deterministic",
        "serve one request many times among others and count the different answers",
        "bijax.determinism.command",
        "add_determinism_parser",
        "run_determinism",
        "bijax.determinism.command:DeterminismError",
    ),
)


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
    given = sys.argv[1:] if argv is None else list(argv)
    command = next((c for c in COMMANDS if given and c.name == given[0]), None)
    parser = _parser((command,) if command else ())
    if not given:
        parser.print_help()
        return 0
    _suggest(parser, given[0])
    parsed = parser.parse_args(given)
    if command is None:
        return _complete(parsed)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that are not UTF-8, as of LC_ALL=C
    try:
        code = _demo(parsed) if command.name == "demo" else int(_load(command.module, command.run)(parsed))
        sys.stdout.flush()
        return code
    except _load(*command.error.split(":")) as error:
        print(f"bijax {command.name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bijax {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `bijax kernels | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports it once more at exit
        return PIPE_CLOSED


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command, which reports unknown arguments itself, with the usage of the command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; ends the program if there are others."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser(loaded: Sequence[Command]) -> argparse.ArgumentParser:
    """Returns the parser.

    Args:
        loaded: The commands whose arguments are added; of the others only the names.
    """
    parser = argparse.ArgumentParser(prog="bijax", description="Batch-invariant JAX.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=_version())
    parser_class: type[argparse.ArgumentParser] = _CommandParser
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=parser_class)
    for command in COMMANDS:
        if command in loaded:
            _load(command.module, command.add)(commands)
        else:
            commands.add_parser(command.name, help=command.help, add_help=False)
    add_completion_parser(commands)
    return parser


def _suggest(parser: argparse.ArgumentParser, word: str) -> None:
    """Ends the program if the command does not exist, naming the closest one."""
    known = [*(c.name for c in COMMANDS), "completion"]
    if word.startswith("-") or word in known:
        return
    close = difflib.get_close_matches(word, known, 1)
    meant = f", did you mean {close[0]!r}?" if close else "."
    parser.error(f"there is no command {word!r}{meant} The commands are: {', '.join(known)}")


def _complete(parsed: argparse.Namespace) -> int:
    try:
        print(script(_parser(COMMANDS), parsed.shell))
    except CompletionError as error:
        print(f"bijax completion: error: {error}", file=sys.stderr)
        return 2
    return 0


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _demo(parsed: argparse.Namespace) -> int:
    from bijax.demo.arguments import Arguments
    from bijax.demo.errors import DemoError

    arguments = Arguments.from_namespace(parsed)
    missing = [name for name in DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"the demo needs packages that are not installed: {', '.join(missing)}; install them with"
            f" `pip install {' '.join(missing)}`"
        )
    # Here, because it imports those packages.
    from bijax.demo.run import run_demo

    return run_demo(arguments)


def _version() -> str:
    own, jax, jaxlib = (_installed(name) for name in (DISTRIBUTION, "jax", "jaxlib"))
    return f"bijax {own} (jax {jax}, jaxlib {jaxlib}, Python {sys.version.split()[0]})"


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
