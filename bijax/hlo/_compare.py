"""Comparing the programs that XLA makes of one function at two batch sizes."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bijax.hlo._frames import short_line
from bijax.hlo._inspect import inspect
from bijax.hlo._report import Finding, Report
from bijax.hlo._table import Rows

if TYPE_CHECKING:
    from rich.console import Group

_OPAQUE = ("library", "dot", "tile", "convolution")
_NOT_COMPARED = ("elementwise", "random")
_Key = tuple[str, str, str, str, int, int, int, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A kind of reduction that the two programs use a different number of times.

    Attributes:
        finding: Such an instruction, from the program that has more of them.
        small: How many the small batch's program has.
        large: How many the large batch's has.
    """

    finding: Finding
    small: int
    large: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two programs of one function. Its text is a table; a rich console shows it in colours.

    Attributes:
        small: Report of the small batch's program.
        large: Report of the large batch's.
        differences: Reductions that differ in operation, implementation, tile, split of K, number of terms or dtypes.
            Code of bijax kernels is ignored: its tiles may depend on the batch without changing a bit.
    """

    small: Report
    large: Report
    differences: tuple[Difference, ...]

    @property
    def alike(self) -> bool:
        """Whether both programs have the same reductions, as far as HLO shows; libraries are opaque."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON-serialisable values."""
        return {
            "alike": self.alike,
            "small": self.small.to_json(),
            "large": self.large.to_json(),
            "differences": [dataclasses.asdict(d) for d in self.differences],
        }

    def table(self) -> Rows:
        """Returns the table of the differences, with a summary below."""
        rows = tuple(_cells(difference) for difference in self.differences)
        opaque = {f.implementation for f in self.large.findings if f.kind in _OPAQUE and f.verdict != "ours"}
        footer = "the programs' reductions are equal" if self.alike else "the programs' reductions differ"
        if self.alike and opaque:
            footer += f", as far as HLO shows; {', '.join(sorted(opaque))} may still choose an algorithm by the shape"
        return Rows(
            f"small batch: {self.small.instructions} instructions; large batch: {self.large.instructions}",
            ("verdict", "instruction", "by", "terms", "shape", "small", "large", "line", "why"),
            rows,
            footer,
            right=(3, 5, 6),
        )

    def __str__(self) -> str:
        return self.table().plain()

    def __rich__(self) -> "Group":
        return self.table().rich()


def _cells(difference: Difference) -> tuple[str, ...]:
    f, terms = difference.finding, str(difference.finding.terms or "")
    counts = (str(difference.small), str(difference.large))
    return f.verdict, f.opcode, f.how, terms, f.shape, *counts, short_line(f.source), f.reason


def compare_hlo(fn: Callable[..., Any], args_small: Sequence[Any], args_large: Sequence[Any]) -> Comparison:
    """Compares the reductions in the programs that XLA makes of a function at two batch sizes.

    Shows where XLA switches the library, uses a row-vector kernel, other tiles or a split of K. Reductions over the
    batch itself have different numbers of terms, and are listed too.

    Args:
        fn: A function, jitted or not.
        args_small: A tuple of its arguments with the small batch: arrays or `jax.ShapeDtypeStruct`.
        args_large: A tuple of its arguments with the large batch.

    Raises:
        TypeError: If `fn` is not a function, or its arguments are not in a tuple or a list.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def shapes(batch):
        ...     return jax.ShapeDtypeStruct((batch, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
        >>> compare_hlo(lambda x, w: jnp.maximum(x, 0), shapes(1), shapes(9)).alike
        True
    """
    if not callable(fn):
        raise TypeError(f"expected a function, which is compiled for both batches; got {type(fn).__name__}.")
    for name, given in (("args_small", args_small), ("args_large", args_large)):
        if not isinstance(given, (tuple, list)):  # an array would be taken apart into its rows
            raise TypeError(
                f"compare_hlo: {name} must be a tuple of the arguments of fn, got {type(given).__name__}; for one"
                " argument write compare_hlo(fn, (small,), (large,))."
            )
    return compare(inspect(fn, *args_small), inspect(fn, *args_large))


def _trips(f: Finding) -> int:
    """Returns the trips of a loop as far as two programs must agree on them; 0 if they are unknown.

    A loop under `bijax.invariant` may run over rows, so its trips depend on the batch; but XLA inlines a loop of one
    trip. In a loop of plain JAX each trip may be a term of a sum.
    """
    return min(f.trips, 2) if f.invariant_loop else f.trips


def compare(small: Report, large: Report) -> Comparison:
    """Compares two reports, for example of dumps; see `compare_hlo`.

    Args:
        small: Report of the small batch's program.
        large: Report of the large batch's.
    """
    counts = {}
    example: dict[_Key, Finding] = {}
    for name, report in (("small", small), ("large", large)):
        counts[name] = Counter[_Key]()
        for f in report.findings:
            if f.kind not in _NOT_COMPARED and f.verdict != "ours":
                key = (f.opcode, f.kind, f.implementation, f.tile, f.split_k, f.terms, _trips(f), f.dtypes)
                counts[name][key] += f.count
                example.setdefault(key, f)
    return Comparison(
        small,
        large,
        tuple(
            Difference(finding, counts["small"][key], counts["large"][key])
            for key, finding in example.items()
            if counts["small"][key] != counts["large"][key]
        ),
    )
