"""Row programs: element-wise steps on the columns and scalars of a row, and reductions of the row."""

from dataclasses import dataclass
from typing import Final, Literal

Operation = Literal[
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "abs",
    "finite",
    "ge",
    "exp",
    "rsqrt",
    "larger",
    "select",
    "round",
    "clear",
    "one",
    "within",
    "max",
    "sum",
]

REDUCTIONS: Final = ("max", "sum")

COLUMN: Final = -1
"""The value that holds the column index."""


@dataclass(frozen=True)
class Step:
    """One operation on float32 values of a row: columns, scalars, or both.

    Attributes:
        operation: "finite" and "ge" return 1 or 0; "larger" is the larger of two numbers, nan if either is nan;
            "select" is its second operand where the first, a mask, is not 0, else its third; "round" rounds to
            bfloat16; "clear" replaces -0 with +0; "one" is 0 plus its third operand where the first two are equal,
            else 0; "within" is its third operand where 0 <= first operand < second operand, else 0; "max" and "sum"
            reduce columns to a scalar.
        result: The value that it computes.
        operands: The values that it takes; a float is a constant.
    """

    operation: Operation
    result: int
    operands: tuple[int | float, ...]


@dataclass(frozen=True)
class RowProgram:
    """The computation of each row. Values are numbered.

    Attributes:
        columns: Inputs with one value per column, one array each.
        masks: Inputs of 0 and 1 with one value per column.
        vectors: Inputs with one value per column, shared by all rows.
        numbers: Scalar inputs.
        steps: The operations in topological order.
        results: Outputs with one value per column.
        dtypes: Dtypes of the results, float32 or bfloat16; the values are already rounded to them.
        parts: The number of bfloat16 limbs of each result, in the layout of a matmul operand; 1 to leave it whole.
        totals: Scalar outputs.
    """

    columns: tuple[int, ...]
    masks: tuple[int, ...]
    vectors: tuple[int, ...]
    numbers: tuple[int, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    dtypes: tuple[str, ...]
    parts: tuple[int, ...]
    totals: tuple[int, ...]

    def wide(self) -> frozenset[int]:
        """Returns the values that have one value per column."""
        found = {*self.columns, *self.masks, *self.vectors, COLUMN}
        for step in self.steps:
            if step.operation not in REDUCTIONS and any(o in found for o in step.operands if isinstance(o, int)):
                found.add(step.result)
        return frozenset(found)


@dataclass(frozen=True)
class Order:
    """Maps a row of the results to a row of an array.

    Attributes:
        terms: (divisor, size, stride) of each dimension; the array's row is the sum of row // divisor % size * stride.
    """

    terms: tuple[tuple[int, int, int], ...]
