"""Launches of the Triton kernels of matmul: sizes and strides of the operands, constants of the machine code, grids."""

from dataclasses import dataclass
from typing import Any, Literal

import jax

from pallas_kernels.matmul.jax_triton.form import ProductForm
from pallas_kernels.matmul.jax_triton.kernels import chain_kernel, split_kernel, tensor_core_kernel
from pallas_kernels.matmul.schedule.jax_triton import Tile, chain_tile, group_gradient_tile, tensor_core_tile
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target


@dataclass(frozen=True)
class Sizes:
    """The sizes and strides of stacks of products.

    Attributes:
        entries: Entries of the stack; with groups, their number.
        rows: Rows of a product.
        depth: Length of the sum.
        columns: Columns of a product.
        x: Strides of the first operand along rows and depth.
        w: Strides of the second operand along depth and columns.
        shared: Whether all entries have the same first and the same second operand.
        grouped: What groups divide: "rows", each with the second operand of its entry; "depth", a sum for each entry;
            or "", nothing.
    """

    entries: int
    rows: int
    depth: int
    columns: int
    x: tuple[int, int]
    w: tuple[int, int]
    shared: tuple[bool, bool]
    grouped: Literal["", "rows", "depth"] = ""

    def form(self, tile: Tile, **more: Any) -> ProductForm:
        """Returns the constants of a kernel for stacks, with those of its tile and others."""
        return ProductForm(
            columns=self.columns,
            x_row=self.x[0],
            x_depth=self.x[1],
            w_depth=self.w[0],
            w_column=self.w[1],
            shared_x=self.shared[0],
            shared_w=self.shared[1],
            tile_rows=tile.rows,
            tile_columns=tile.columns,
            tile_depth=tile.depth,
            group=tile.group,
            **more,
        )

    def grid(self, tile: Tile) -> tuple[int]:
        """Returns the number of programs: of rows in groups, as many as any sizes of the groups need."""
        columns = -(-self.columns // tile.columns)
        if self.grouped == "rows":
            rows_and_ends = self.rows + (self.entries + 1) * (tile.rows - 1)
            return (min(self.rows, rows_and_ends // tile.rows) * columns,)
        return (self.entries * -(-self.rows // tile.rows) * columns,)

    @property
    def per_group(self) -> tuple[int, int, int]:
        """The entries, rows and depth of a product if all groups had as many rows."""
        mean = -(-(self.depth if self.grouped == "depth" else self.rows) // self.entries)
        if self.grouped == "rows":
            return min(self.entries, self.rows), mean, self.depth
        return self.entries, self.rows, mean if self.grouped else self.depth

    def has_whole_rows(self, tile: Tile) -> bool:
        """Whether rows need no mask: those outside of the array are as good as others unless most of them are."""
        rows = self.per_group[1] if self.grouped == "rows" else self.rows
        return self.rows % tile.rows == 0 or (self.x[0] != 1 and 2 * rows >= tile.rows)


@dataclass(frozen=True)
class Additions:
    """What is optional in a product on tensor cores: other operands, and how its sums are divided.

    Attributes:
        up: A second operand of the same shape as the first `w`, whose product is multiplied with the other one.
        bias: (columns,), added to the sum.
        activation: Applied after the bias.
        residual: Of the shape of the result, added after the activation.
        total: Of the shape of the result, float32, which the sums continue.
        scales: Factors of the rows and columns of integer or float8 products.
        groups: (entries,) int32, the sizes of the groups.
        splits: Parts of K with sums of their own.
        split_length: Elements of such a part.
        folds: Whether the products of each tile of the depth have a sum of their own, which is added.
    """

    up: jax.Array | None = None
    bias: jax.Array | None = None
    activation: str | None = None
    residual: jax.Array | None = None
    total: jax.Array | None = None
    scales: tuple[jax.Array, jax.Array] | None = None
    groups: jax.Array | None = None
    splits: int = 1
    split_length: int = 0
    folds: bool = False


def chosen_tile(sizes: Sizes, itemsize: int, target: Target, products: int = 1) -> Tile:
    """Returns the tile of a product on tensor cores."""
    stack, rows, depth = sizes.per_group
    options: dict[str, Any] = {"shared_memory": target.shared_memory, "features": target.features, "stack": stack}
    if sizes.grouped == "depth":
        return group_gradient_tile(rows, sizes.columns, depth=depth, **options)
    return tensor_core_tile(rows, sizes.columns, depth=depth, itemsize=itemsize, products=products, **options)


def on_tensor_cores(
    x: jax.Array,
    w: jax.Array,
    sizes: Sizes,
    out: jax.ShapeDtypeStruct,
    target: Target,
    tile: Tile | None,
    added: Additions | None = None,
) -> jax.Array:
    """Runs the kernel with one chain of products, or several, for each element."""
    added = Additions() if added is None else added
    itemsize = x.dtype.itemsize
    if tile is None:
        tile = chosen_tile(sizes, itemsize, target, 1 if added.up is None else 2)
    whole_depth = sizes.grouped != "depth" and sizes.depth % tile.depth == 0 and added.split_length % tile.depth == 0
    form = sizes.form(
        tile,
        whole_rows=sizes.has_whole_rows(tile),
        whole_depth=whole_depth,
        whole_columns=sizes.w[1] != 1 or sizes.columns % tile.columns == 0,
        precision="tf32" if itemsize == 4 else "ieee",
        folds=added.folds,
        splits=added.splits,
        split_length=added.split_length,
        grouped=sizes.grouped,
        groups=sizes.entries if sizes.grouped else 0,
        groups_block=1 << (sizes.entries - 1).bit_length() if sizes.grouped else 0,
        has_up=added.up is not None,
        has_bias=added.bias is not None,
        has_residual=added.residual is not None,
        has_total=added.total is not None,
        has_scales=added.scales is not None,
        activation=added.activation or "",
    )
    row_scale, column_scale = (None, None) if added.scales is None else added.scales
    optional = (added.up, added.bias, added.residual, added.total, row_scale, column_scale, added.groups)
    return _run(tensor_core_kernel, (x, w), optional, sizes, out, target, tile, {"form": form})


def in_splits_at_once(
    x: jax.Array,
    w: jax.Array,
    sizes: Sizes,
    out: jax.ShapeDtypeStruct,
    target: Target,
    tile: Tile,
    added: Additions,
) -> jax.Array:
    """Runs the kernel whose warps sum the parts of K at the same time; there are exactly as many parts as splits."""
    form = sizes.form(
        tile,
        whole_rows=sizes.has_whole_rows(tile),
        whole_depth=sizes.depth == added.splits * added.split_length and added.split_length % tile.depth == 0,
        whole_columns=sizes.w[1] != 1 or sizes.columns % tile.columns == 0,
        splits=added.splits,
        split_length=added.split_length,
        has_bias=added.bias is not None,
        has_residual=added.residual is not None,
        activation=added.activation or "",
    )
    return _run(split_kernel, (x, w), (added.bias, added.residual), sizes, out, target, tile, {"form": form})


def in_chains(
    x: jax.Array,
    w: jax.Array,
    sizes: Sizes,
    out: jax.ShapeDtypeStruct,
    target: Target,
    tile: Tile | None,
    *,
    block: int,
    dtype: str,
    from_zero: bool,
    bias: jax.Array | None = None,
    total: jax.Array | None = None,
) -> jax.Array:
    """Runs the kernel whose sums are chains of fused multiply-adds of `block` elements."""
    tile = chain_tile(sizes.rows) if tile is None else tile
    form = sizes.form(tile, has_bias=bias is not None, has_total=total is not None)
    constants = {"BLOCK": block, "WIDE": dtype == "float64", "FROM_ZERO": from_zero, "form": form}
    return _run(chain_kernel, (x, w), (bias, total), sizes, out, target, tile, constants, fuses=True)


def _run(
    kernel: Any,
    operands: tuple[jax.Array, jax.Array],
    optional: tuple[jax.Array | None, ...],
    sizes: Sizes,
    out: jax.ShapeDtypeStruct,
    target: Target,
    tile: Tile,
    constants: dict[str, Any],
    *,
    fuses: bool = False,
) -> jax.Array:
    """Launches a kernel on its operands and on optional arrays, of which an absent one is not read."""
    (y,) = launch(
        kernel,
        *operands,
        *(operands[0] if a is None else a for a in optional),
        sizes.rows,
        sizes.depth,
        target=target,
        out=[out],
        grid=sizes.grid(tile),
        warps=tile.warps,
        stages=tile.stages,
        fuses=fuses,
        constants=constants,
    )
    return y
