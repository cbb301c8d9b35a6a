"""The command `bijax contracts`."""

import argparse
import json
import sys

from bijax.inspect.contracts import NoContractError, contracts
from bijax.inspect.load import add_function_arguments, called, check_architecture, modules_from_here, reported
from bijax.transform.rules.registry import PLATFORMS

DESCRIPTION = """\
Prints the contracts that fix the bits of a function's rows, and one fingerprint of them. Equal fingerprints of a
trainer and a sampler promise equal bits of a row; store one with a checkpoint. The function is traced, not run."""
EPILOG = """\
exit code: 0; 1 if an operation is not invariant, so that nothing fixes its bits; 2 if the function cannot be traced"""


def add_contracts_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `contracts` to the commands."""
    parser = commands.add_parser(
        "contracts",
        help="print the contracts that fix the bits of a function, and their fingerprint",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function; modules are found from here, too")
    add_function_arguments(parser)
    parser.add_argument("--platform", choices=PLATFORMS, help="platform (default: the present one)")
    parser.add_argument(
        "--architecture", metavar="SM", help="architecture of the GPU, such as sm_90, for --platform cuda"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_contracts(parsed: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        CommandError: If the function or its arguments cannot be loaded, or it cannot be traced.
    """
    with modules_from_here():
        function, args, kwargs = called(parsed.function, parsed.args)
        check_architecture(parsed.platform, parsed.architecture)
        options = {name: getattr(parsed, name) for name in ("platform", "architecture")}
        with reported(f"{parsed.function} has no contracts"):
            try:
                found = contracts(function, *args, **options, **kwargs)
            except NoContractError as error:
                print(f"bijax contracts: {parsed.function}: {error}", file=sys.stderr)
                return 1
    print(json.dumps(found.to_json(), indent=2) if parsed.json else found)
    return 0
