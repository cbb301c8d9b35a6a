"""Findings as annotations of GitHub Actions, which show them next to the lines of a pull request.

Source: "Workflow commands for GitHub Actions",
https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from collections.abc import Iterator
from pathlib import Path

from bijax import hlo
from bijax.inspect.audit_report import Audit


def annotations(result: Audit | hlo.Report) -> Iterator[str]:
    """Yields a line for each finding, and the verdict last.

    Args:
        result: An audit, or the report of a compiled program.
    """
    if isinstance(result, Audit):
        for operation in result.variant:
            yield _command("error", operation.line, operation.verdict, f"{operation.primitive}: {operation.why}")
        for meeting in result.rows.meetings if result.rows else ():
            level = "error" if meeting.effect == "mixes rows" else "notice"
            yield _command(level, meeting.line, meeting.effect, f"{meeting.primitive}: {meeting.why}")
        report = result.hlo
    else:
        report = result
    if report is not None:
        for finding in report.variant:
            yield _command("error", finding.source, finding.verdict, f"{finding.opcode}: {finding.reason}")
    yield result.verdict


def _command(level: str, line: str, title: str, text: str) -> str:
    file, _, number = line.rpartition(":")
    place = f"file={_property(_relative(file))},line={number}," if file and number.isdigit() else ""
    return f"::{level} {place}title={_property(f'bijax audit, {title}')}::{_data(text)}"


def _relative(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
