"""The report of an audit."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from bijax.hlo import Report
from bijax.hlo._frames import short_line
from bijax.hlo._table import Rows, percent
from bijax.inspect.gathered import Gathered
from bijax.inspect.rows_report import BatchRows

if TYPE_CHECKING:
    from rich.console import Group

Decision = Literal["refused", "variant", "believed", "replaced", "invariant"]
_ORDER: tuple[Decision, ...] = ("refused", "variant", "believed", "replaced", "invariant")
_SHOWN = 4
_STYLES = {
    "refused": "bold red",
    "variant": "red",
    "mixes rows": "red",
    "sums rows": "cyan",
    "gathered": "cyan",
    "believed": "yellow",
    "replaced": "green",
    "invariant": "dim",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program; identical ones of one line are merged.

    Attributes:
        verdict: "invariant" by construction; "replaced" by an invariant version; "believed": XLA's own, and no batch
            size is known to change it; "variant": XLA's own, and its bits may depend on the batch; "refused": the
            program under `bijax.invariant` cannot be lowered because of it.
        primitive: Name of the JAX primitive.
        evidence: Why it has its verdict.
        line: "FILE:LINE" of the user's program; may be empty.
        shapes: Shapes of operands and results, of the first operation if there are several.
        count: Number of operations.
        flops: Floating-point operations in one run of the program; see `Audit`.
        share: Their share of the program's, 0 to 1.
        contracts: Ids of the contracts that fix its bits; empty where order is irrelevant or XLA's own.
        unknown: Whether it passes although no contract fixes its bits: a user's kernel, or named in `allow`.
        allowed: Whether it passes only because `allow` names it.
        refusable: Whether `bijax.invariant` refuses it, or would refuse it.
    """

    verdict: Decision
    primitive: str
    evidence: str
    line: str
    shapes: str
    count: int
    flops: int
    share: float
    contracts: tuple[str, ...] = ()
    unknown: bool = False
    allowed: bool = False
    refusable: bool = False

    @property
    def why(self) -> str:
        """The evidence, with the contracts."""
        return f"{self.evidence} [{', '.join(self.contracts)}]" if self.contracts else self.evidence


@dataclasses.dataclass(frozen=True)
class Audit:
    """Every operation of a program. Its text is a table; a rich console shows it in colours.

    Attributes:
        operations: The operations, in the order of the program.
        platform: "cpu" or "cuda".
        flops: Floating-point operations in one run. Loops of unknown length count as one trip, all branches of a
            condition count, and calls of unknown work count as zero.
        hlo: The report of the compiled program, if requested and nothing is refused.
        rows: What becomes of the rows of the batch, if `batch_axes` was given.
        gathered: What the operations under `bijax.invariant` gather, if arguments are sharded.
    """

    operations: tuple[Operation, ...]
    platform: str
    flops: int
    hlo: Report | None = None
    rows: BatchRows | None = None
    gathered: tuple[Gathered, ...] = ()

    @property
    def variant(self) -> tuple[Operation, ...]:
        """The operations whose bits may depend on the batch, and refused operations."""
        return tuple(o for o in self.operations if o.verdict in ("variant", "refused"))

    @property
    def invariant(self) -> bool:
        """Whether no operation is variant, nothing in the compiled program if it was inspected, and no rows mix.

        Rows are followed only if `batch_axes` was given.
        """
        mixes = self.rows is not None and self.rows.verdict == "mixes rows"
        return not self.variant and not mixes and (self.hlo is None or self.hlo.invariant)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON-serialisable values."""
        return {
            "platform": self.platform,
            "invariant": self.invariant,
            "verdict": self.verdict,
            "flops": self.flops,
            "operations": [dataclasses.asdict(o) for o in self.operations],
            "hlo": self.hlo.to_json() if self.hlo else None,
            "rows": dataclasses.asdict(self.rows) if self.rows else None,
            "gathered": [dataclasses.asdict(g) for g in self.gathered],
        }

    def table(self) -> Rows:
        """Returns the table, variant operations first, and one row for the invariant operations of each reason."""
        looked_at = sorted((o for o in self.operations if o.verdict != "invariant"), key=_rank)
        meetings = self.rows.meetings if self.rows else ()
        rows: list[tuple[str, ...]] = [(m.effect, m.primitive, "", "", short_line(m.line), m.why) for m in meetings]
        rows += [
            (
                "gathered",
                f"{g.primitive}{f' ×{g.count}' if g.count > 1 else ''}",
                g.shape,
                "",
                short_line(g.line),
                g.why,
            )
            for g in self.gathered
        ]
        rows += [
            (
                o.verdict,
                f"{o.primitive}{f' ×{o.count}' if o.count > 1 else ''}",
                o.shapes,
                percent(o.share),
                short_line(o.line),
                o.why,
            )
            for o in looked_at
        ]
        rows += [
            ("invariant", _names(group), "", percent(sum(o.share for o in group)), "", evidence)
            for evidence, group in self._invariant().items()
        ]
        total = sum(o.count for o in self.operations)
        return Rows(
            f"{total} operation{'s' * (total != 1)} for {self.platform}, {self.flops:,} FLOPs",
            ("verdict", "operation", "shapes", "FLOPs", "line", "why"),
            tuple(rows),
            self.verdict,
            right=(3,),
        )

    def _invariant(self) -> dict[str, list[Operation]]:
        groups: dict[str, list[Operation]] = {}
        for operation in self.operations:
            if operation.verdict == "invariant":
                groups.setdefault(operation.why, []).append(operation)
        return groups

    @property
    def verdict(self) -> str:
        """The verdict in words, with the numbers of operations: a line or two."""
        parts = []
        for verdict in _ORDER:
            group = [o for o in self.operations if o.verdict == verdict]
            if group:
                share = percent(sum(o.share for o in group))
                parts.append(f"{sum(o.count for o in group)} {verdict}{f' ({share} of the FLOPs)' if share else ''}")
        mixes = self.rows is not None and self.rows.verdict == "mixes rows"
        head = "not invariant" if self.variant else "each operation is invariant by itself" if mixes else "invariant"
        lines = [f"{head}: {', '.join(parts) or 'no operations'}"]
        mendable = [o for o in self.variant if not o.refusable]
        if mendable:
            which = "variant" if len(mendable) == len(self.variant) else "other variant"
            lines.append(f"bijax.invariant(fn) makes the {which} operations invariant")
        if len(mendable) < len(self.variant):
            names = ", ".join(dict.fromkeys(o.primitive for o in self.variant if o.refusable))
            lines.append(f"bijax.invariant refuses {names}: move it out of fn or replace it, see docs/guide/errors.md")
        return "\n".join([*lines, *([str(self.rows)] if self.rows else [])])

    def __str__(self) -> str:
        return "\n\n".join(map(str, (self.table().plain(), *([self.hlo] if self.hlo else []))))

    def _repr_html_(self) -> str:
        compiled = self.hlo._repr_html_() if self.hlo else ""
        return f"{self.table().html(_STYLES)}{compiled}"

    def __rich__(self) -> "Group":
        from rich.console import Group

        table = self.table().rich(_STYLES)
        return Group(table, "", self.hlo) if self.hlo else table


def _rank(operation: Operation) -> tuple[int, float]:
    return _ORDER.index(operation.verdict), -operation.share


def _names(operations: list[Operation]) -> str:
    counts = Counter[str]()
    for operation in operations:
        counts[operation.primitive] += operation.count
    shown = [f"{name}{f' ×{n}' if n > 1 else ''}" for name, n in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")
