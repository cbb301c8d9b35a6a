"""A program on rows: element-wise steps on columns and on numbers of a row, and reductions of a row."""

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
"""The value that is the number of each column."""


@dataclass(frozen=True)
class Step:
    """One operation on float32 values of a row: columns, numbers, or both.

    Attributes:
        operation: "finite" and "ge" are 1 or 0; "larger" is the larger one of two numbers, nan if one is nan; "select"
            is its second operand where the first, a mask, is not 0, else its third; "round" rounds to bfloat16; "clear"
            makes +0 of -0; "one" is 0 plus its third operand where the first two are equal, else 0; "within" is its
            third operand if the first is a column of so many as the second says, else 0; "max" and "sum" reduce columns
            to a number.
        result: Which value it makes.
        operands: Which values it takes; a float stands for itself.
    """

    operation: Operation
    result: int
    operands: tuple[int | float, ...]


@dataclass(frozen=True)
class RowProgram:
    """What is computed of every row. Values are numbered.

    Attributes:
        columns: Values given as columns, an array each.
        masks: Values given as columns of 0 and 1.
        vectors: Values given as columns that all rows share.
        numbers: Values given as a number.
        steps: The operations, each behind those that make its operands.
        results: Values wanted as columns.
        dtypes: Their dtypes, float32 or bfloat16, to which they are rounded already.
        parts: In how many bfloat16 parts each is wanted, in the layout of a product's operand; 1 as it is.
        totals: Values wanted as a number.
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
        """Returns the values that are columns."""
        found = {*self.columns, *self.masks, *self.vectors, COLUMN}
        for step in self.steps:
            if step.operation not in REDUCTIONS and any(o in found for o in step.operands if isinstance(o, int)):
                found.add(step.result)
        return frozenset(found)


@dataclass(frozen=True)
class Order:
    """Which row of an array belongs to a row of the results.

    Attributes:
        terms: (divisor, size, stride) of each dimension: the sum of row // divisor % size * stride.
    """

    terms: tuple[tuple[int, int, int], ...]
