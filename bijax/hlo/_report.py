"""The findings of an inspection."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from bijax.hlo._frames import short_line
from bijax.hlo._libraries import Verdict
from bijax.hlo._table import Rows, percent

if TYPE_CHECKING:
    from rich.console import Group

_ORDER: tuple[Verdict, ...] = ("variant", "suspect", "note", "ours")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One instruction, or several identical ones.

    Attributes:
        verdict: "variant": the order of its sums may depend on the size of the batch; "suspect": it may, but that is
            not visible here; "note": it does not, but is worth knowing; "ours": code of a bijax kernel, of fixed shape.
        opcode: As HLO writes it.
        kind: "dot", "convolution", "library", "tile" (a tuned GEMM fusion), "split_k", "reduction", "scatter",
            "collective", "sort", "random", "loop", "custom_call", "elementwise" or "division".
        shape: Shape of the result, without layouts.
        reason: Why it has its verdict.
        source: "FILE:LINE" of the user's program; prefixed by "~" if XLA dropped it and a neighbour's is shown; may be
            empty.
        operation: Name of the traced operation, such as "jit(f)/dot_general"; may be empty.
        implementation: Library, kind of fusion or call; "XLA" if XLA compiles it.
        tile: Tile of a GEMM fusion (M x N x K) or the algorithm of a library; empty if unspecified.
        split_k: Number of K splits.
        terms: How many terms each sum has; 0 where there are none or it is unknown.
        trips: Number of trips of a loop; 0 where there is no loop or it is unknown.
        invariant_loop: Whether it is a loop under `bijax.invariant`.
        dtypes: Dtypes of the operands.
        flops: Floating-point operations in one run of the program; 0 where they cannot be counted.
        share: Their share of the program's, 0 to 1.
        name: The instruction, the first of them if there are several.
        count: Number of instructions.
    """

    verdict: Verdict
    opcode: str
    kind: str
    shape: str
    reason: str
    source: str = ""
    operation: str = ""
    implementation: str = ""
    tile: str = ""
    split_k: int = 1
    terms: int = 0
    trips: int = 0
    invariant_loop: bool = False
    dtypes: tuple[str, ...] = ()
    flops: int = 0
    share: float = 0.0
    name: str = ""
    count: int = 1

    @property
    def how(self) -> str:
        """Implementation, tile and split of K in one text; for a loop, its trips."""
        if self.kind == "loop":
            return f"{self.trips or 'unknown'} trip{'s' * (self.trips != 1)}"
        split = f" split_k {self.split_k}" if self.split_k > 1 else ""
        return f"{self.implementation}{f' {self.tile}' if self.tile else ''}{split}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found in a program. Its text is a table; a rich console shows it in colours.

    Attributes:
        findings: What was found.
        platform: "cpu", "gpu", or "unknown" if a text does not show it.
        stage: "optimised" for a compiled program, "lowered" for one before XLA's rewrites, where libraries and tiles
            are not chosen yet.
        flops: Floating-point operations in one run.
        instructions: Number of instructions that were read.
    """

    findings: tuple[Finding, ...]
    platform: str
    stage: Literal["optimised", "lowered"]
    flops: int
    instructions: int

    @property
    def variant(self) -> tuple[Finding, ...]:
        """The variant and suspect findings: empty for a program whose bits do not depend on the batch."""
        return tuple(f for f in self.findings if f.verdict in ("variant", "suspect"))

    @property
    def ours(self) -> tuple[Finding, ...]:
        """The code of bijax kernels."""
        return tuple(f for f in self.findings if f.verdict == "ours")

    @property
    def invariant(self) -> bool:
        """Whether nothing is variant or suspect."""
        return not self.variant

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON-serialisable values."""
        return {
            "platform": self.platform,
            "stage": self.stage,
            "invariant": self.invariant,
            "verdict": self.verdict,
            "flops": self.flops,
            "instructions": self.instructions,
            "findings": [dataclasses.asdict(f) | {"dtypes": list(f.dtypes)} for f in self.findings],
        }

    def table(self) -> Rows:
        """Returns the table of the findings outside bijax kernels, with a summary below."""
        shown = sorted((f for f in self.findings if f.verdict != "ours"), key=_rank)
        rows = tuple(
            (
                f.verdict,
                f"{f.opcode}{f' ×{f.count}' if f.count > 1 else ''}",
                f.how,
                f.shape,
                percent(f.share),
                short_line(f.source),
                f.reason,
            )
            for f in shown
        )
        instructions = f"{self.instructions} instruction{'s' * (self.instructions != 1)}"
        return Rows(
            f"{self.stage} program for {self.platform}, {instructions}, {self.flops:,} FLOPs",
            ("verdict", "instruction", "by", "shape", "FLOPs", "line", "why"),
            rows,
            self.verdict,
            right=(4,),
        )

    @property
    def verdict(self) -> str:
        """The verdict in one line, with the numbers of findings."""
        counts = {v: sum(f.count for f in self.findings if f.verdict == v) for v in _ORDER}
        ours = percent(sum(f.share for f in self.ours))
        parts = [f"{n} {v}" for v, n in counts.items() if n and v != "ours"]
        if counts["ours"]:
            parts.append(f"{counts['ours']} of bijax kernels{f' ({ours} of the FLOPs)' if ours else ''}")
        return ("invariant: " if self.invariant else "not invariant: ") + (", ".join(parts) or "nothing found")

    def __str__(self) -> str:
        return self.table().plain()

    def _repr_html_(self) -> str:
        return self.table().html()

    def __rich__(self) -> "Group":
        return self.table().rich()


def _rank(finding: Finding) -> tuple[int, float]:
    return _ORDER.index(finding.verdict), -finding.share
