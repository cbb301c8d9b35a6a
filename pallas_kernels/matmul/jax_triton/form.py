"""What the Triton kernels of matmul know of a product when they are compiled."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProductForm:
    """Constants of the machine code of a product: everything but the numbers of rows and the length of the sum.

    Attributes:
        columns: Columns of the result.
        x_row: Stride of the first operand along rows.
        x_depth: The same along the sum.
        w_depth: Stride of the second operand along the sum.
        w_column: The same along columns.
        shared_x: Whether all entries of a stack have the same first operand.
        shared_w: The same for the second.
        tile_rows: Rows of a tile.
        tile_columns: Columns of a tile.
        tile_depth: Elements of the sum that are read at once.
        group: Rows of tiles that consecutive programs share.
        whole_rows: Whether rows need no mask.
        whole_depth: The same for the sum.
        whole_columns: The same for columns.
        precision: "tf32" for float32 operands, else "ieee".
        folds: Whether the products of each tile of the sum have an accumulator of their own, which is added.
        splits: Parts of the sum with accumulators of their own.
        split_length: Elements of such a part.
        grouped: What groups divide; see `Sizes`.
        groups: Number of groups, 0 without.
        groups_block: The next power of two.
        has_up: Whether there are second weights, whose product multiplies the first one.
        has_bias: Whether there is a bias.
        has_residual: Whether there is a residual.
        has_total: Whether the sums continue others.
        has_scales: Whether rows and columns have scales.
        activation: Name of the function after the bias, or "".
    """

    columns: int
    x_row: int
    x_depth: int
    w_depth: int
    w_column: int
    shared_x: bool
    shared_w: bool
    tile_rows: int
    tile_columns: int
    tile_depth: int
    group: int
    whole_rows: bool = False
    whole_depth: bool = False
    whole_columns: bool = False
    precision: Literal["ieee", "tf32"] = "ieee"
    folds: bool = False
    splits: int = 1
    split_length: int = 0
    grouped: Literal["", "rows", "depth"] = ""
    groups: int = 0
    groups_block: int = 0
    has_up: bool = False
    has_bias: bool = False
    has_residual: bool = False
    has_total: bool = False
    has_scales: bool = False
    activation: str = ""
