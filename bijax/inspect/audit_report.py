"""The report of an audit."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from bijax.hlo import Report
from bijax.hlo._table import Rows, percent

if TYPE_CHECKING:
    from rich.console import Group

Decision = Literal["refused", "variant", "believed", "replaced", "invariant"]
_ORDER: tuple[Decision, ...] = ("refused", "variant", "believed", "replaced", "invariant")
_SHOWN = 4
_STYLES = {"refused": "bold red", "variant": "red", "believed": "yellow", "replaced": "green", "invariant": "dim"}


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
    """

    operations: tuple[Operation, ...]
    platform: str
    flops: int
    hlo: Report | None = None

    @property
    def variant(self) -> tuple[Operation, ...]:
        """The operations whose bits may depend on the batch, and refused operations."""
        return tuple(o for o in self.operations if o.verdict in ("variant", "refused"))

    @property
    def invariant(self) -> bool:
        """Whether no operation is variant, nor anything in the compiled program if it was inspected."""
        return not self.variant and (self.hlo is None or self.hlo.invariant)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON-serialisable values."""
        return {
            "platform": self.platform,
            "invariant": self.invariant,
            "flops": self.flops,
            "operations": [dataclasses.asdict(o) for o in self.operations],
            "hlo": self.hlo.to_json() if self.hlo else None,
        }

    def table(self) -> Rows:
        """Returns the table, variant operations first, and one row for the invariant operations of each reason."""
        looked_at = sorted((o for o in self.operations if o.verdict != "invariant"), key=_rank)
        rows = [
            (
                o.verdict,
                f"{o.primitive}{f' ×{o.count}' if o.count > 1 else ''}",
                o.shapes,
                percent(o.share),
                o.line.rpartition("/")[2],
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
            f"{total} operations for {self.platform}, {self.flops:,} FLOPs",
            ("verdict", "operation", "shapes", "FLOPs", "line", "why"),
            tuple(rows),
            self._summary(),
            right=(3,),
        )

    def _invariant(self) -> dict[str, list[Operation]]:
        groups: dict[str, list[Operation]] = {}
        for operation in self.operations:
            if operation.verdict == "invariant":
                groups.setdefault(operation.why, []).append(operation)
        return groups

    def _summary(self) -> str:
        parts = []
        for verdict in _ORDER:
            group = [o for o in self.operations if o.verdict == verdict]
            if group:
                share = percent(sum(o.share for o in group))
                parts.append(f"{sum(o.count for o in group)} {verdict}{f' ({share} of the FLOPs)' if share else ''}")
        return ("not invariant: " if self.variant else "invariant: ") + (", ".join(parts) or "no operations")

    def __str__(self) -> str:
        return "\n\n".join(map(str, (self.table().plain(), *([self.hlo] if self.hlo else []))))

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
