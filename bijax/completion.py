"""The command `bijax completion`: completion for shells, made by shtab.

Source: shtab, https://docs.iterative.ai/shtab
"""

import argparse
import importlib.util
from typing import Final

SHELLS: Final = ("bash", "zsh", "tcsh")
"""The shells for which shtab makes scripts."""


class CompletionError(Exception):
    """The script cannot be made."""


def add_completion_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `completion` to the commands."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description='Prints a completion script; needs shtab. For bash: eval "$(bijax completion bash)".',
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the completion script of a parser.

    Args:
        parser: The parser, with all its commands.
        shell: One of `SHELLS`.

    Raises:
        CompletionError: If shtab is not installed.
    """
    if importlib.util.find_spec("shtab") is None:
        raise CompletionError("the package shtab is not installed; install it with `pip install shtab`")
    import shtab

    return str(shtab.complete(parser, shell))
