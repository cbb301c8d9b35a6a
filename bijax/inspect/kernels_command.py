"""The command `bijax kernels`: the registry of kernels, and those that serve each kind of call."""

import argparse
import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from bijax.hlo._table import Rows
from pallas_kernels import registry
from pallas_kernels.registry import Kernel
from pallas_kernels.target import Target

DESCRIPTION: Final = (
    "Lists the kernels with the operation, the targets and the contract of each. A contract that depends on the call"
    " is named by its kind; --cases shows which kernel serves typical calls, under which contract."
)
_OPS: Final = ("pallas_kernels.", "bijax.lax.", "bijax.ops.")


class KernelsError(Exception):
    """The command cannot run with these arguments."""


def add_kernels_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `kernels` to the commands."""
    parser = commands.add_parser(
        "kernels", help="list the kernels, their targets and the contracts that fix their bits", description=DESCRIPTION
    )
    parser.add_argument("--operation", metavar="NAME", help="this operation alone, such as matmul or rms_norm")
    parser.add_argument(
        "--target", metavar="NAME", help="what runs on this target alone: cpu, or an architecture such as sm_90"
    )
    parser.add_argument(
        "--cases",
        action="store_true",
        help="trace a call of each kind and list what serves it; all of them take half a minute",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_kernels(parsed: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        KernelsError: If the target or the operation does not exist.
    """
    entries = _cases(parsed) if parsed.cases else _registered(parsed)
    if not entries:
        _check_operation(parsed)
        raise KernelsError(f"no kernel of {parsed.operation} runs on {parsed.target}")
    if parsed.json:
        print(json.dumps(entries, indent=2))
    else:
        print(_table(entries).plain())
        number = len({entry["operation"] for entry in entries})
        what, of = "call" if parsed.cases else "kernel", f"{number} operation{'s' * (number != 1)}"
        where = f" on {parsed.target}" if parsed.target else ""
        print(f"{len(entries)} {what}{'s' * (len(entries) != 1)} of {of}{where}")
    return 0


def _check_operation(parsed: argparse.Namespace) -> None:
    if parsed.cases:
        from bijax.inspect.kernel_table import CASES

        known = sorted({case.operation for case in CASES})
    else:
        known = sorted({kernel.operation for kernel in registry.kernels()})
    if parsed.operation in known:
        return
    close = difflib.get_close_matches(parsed.operation, known, 1)
    meant = f", did you mean {close[0]!r}?" if close else "."
    raise KernelsError(f"--operation: there is no {parsed.operation!r}{meant} The operations are: {', '.join(known)}")


def _target(name: str) -> Target:
    try:
        target = Target.parse(name)
    except ValueError as error:
        raise KernelsError(f"--target: {error}") from error
    if all(kernel.rank(target) is None for kernel in registry.kernels()):
        raise KernelsError(
            f"--target: expected cpu, cuda, or an architecture such as sm_90; no kernel runs on {name!r}"
        )
    return target


def _registered(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the requested kernels; for one target, the most specific ones first."""
    found: Sequence[Kernel] = registry.kernels(parsed.operation)
    if parsed.target is not None:
        target = _target(parsed.target)
        ranked = [(rank, kernel) for kernel in found if (rank := kernel.rank(target)) is not None]
        found = [kernel for _, kernel in sorted(ranked, key=lambda pair: pair[0], reverse=True)]
    return [
        {
            "operation": kernel.operation,
            "on": list(kernel.patterns),
            "contracts": [_described(c) for c in (kernel.contract, kernel.functions) if c is not None],
            "kernel": kernel.name,
            "conditions": _conditions(kernel),
        }
        for kernel in sorted(found, key=lambda kernel: kernel.operation)
    ]


def _cases(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    # Imported here, because importing it builds the calls that it lists.
    from bijax.inspect import kernel_table

    targets = kernel_table.TARGETS if parsed.target is None else (_target(parsed.target),)
    return [
        {
            "operation": row.case.operation,
            "case": row.case.case,
            "on": [row.target],
            "dtypes": list(row.dtypes),
            "contracts": list(row.contracts),
            "kernel": ", ".join(row.kernels),
        }
        for row in kernel_table.rows(targets, parsed.operation)
    ]


def _conditions(kernel: Kernel) -> list[str]:
    """Returns what choosing a kernel takes: that a caller names its backend, that packages are installed."""
    preferred = f'only under bijax.prefer_backend("{kernel.backend}")'
    by_name = [preferred + (", or for few rows" if kernel.instead else "")] if kernel.by_name else []
    is_missing = kernel.packages is not None and not kernel.packages.are_installed
    return by_name + ([f"not here: {kernel.packages.advice}"] if is_missing and kernel.packages else [])


def _described(contract: Any) -> str:
    """Returns the id of a contract, or the kinds of the contracts that a function chooses."""
    if not callable(contract):
        return str(contract.id)
    return _kinds(contract)


def _kinds(choose: Callable[..., Any]) -> str:
    if isinstance(choose, type):
        return choose.__name__
    kinds = inspect.signature(choose).return_annotation
    return " or ".join(kind.__name__ for kind in getattr(kinds, "__args__", (kinds,)) if kind is not type(None))


def _table(entries: Iterable[dict[str, Any]]) -> Rows:
    entries = list(entries)
    conditions = sorted({c for entry in entries for c in entry.get("conditions", ())})
    lines = []
    for entry in entries:
        marks = "".join(f" ({conditions.index(c) + 1})" for c in entry.get("conditions", ()))
        case = entry.get("case", "")
        operation = f"{entry['operation']}{', ' if case else ''}{case}"
        dtypes = (", ".join(d.replace("float", "f") for d in entry["dtypes"]),) if "dtypes" in entry else ()
        lines.append(
            (operation, ", ".join(entry["on"]), *dtypes, ", ".join(entry["contracts"]), _short(entry["kernel"]) + marks)
        )
    is_traced = bool(lines) and len(lines[0]) > 4
    header: tuple[str, ...] = ("operation", "targets", "contracts", "kernel")
    if is_traced:
        header = ("operation, case", "target", "dtypes", "contracts", "kernels")
    footer = "\n".join(f"({number + 1}) {condition}" for number, condition in enumerate(conditions))
    return Rows("Kernels and contracts", header, tuple(lines), footer)


def _short(kernels: str) -> str:
    names = kernels.split(", ")
    for folder in _OPS:
        names = [name.removeprefix(folder) for name in names]
    return ", ".join(name.replace(".launch.", ".").replace(".launch:", ":") for name in names)
