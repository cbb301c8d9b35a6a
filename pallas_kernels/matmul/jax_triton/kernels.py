"""Bodies of the Triton kernels of matmul: one tile of the result per program.

Strides, widths and tiles are constants of the machine code, numbers of rows and the length of the sum are not: all
numbers of rows share it, which is also why their tiles can only depend on rows that exist.
"""

import triton
import triton.language as tl

from pallas_kernels.matmul.jax_triton.activation import activate


@triton.jit
def tensor_core_kernel(
    x_ptr,
    w_ptr,
    up_ptr,
    bias_ptr,
    residual_ptr,
    total_ptr,
    row_scale_ptr,
    column_scale_ptr,
    sizes_ptr,
    rows,
    depth,
    y_ptr,
    COLUMNS: tl.constexpr,
    X_ROW: tl.constexpr,
    X_DEPTH: tl.constexpr,
    W_DEPTH: tl.constexpr,
    W_COLUMN: tl.constexpr,
    SHARED_X: tl.constexpr,
    SHARED_W: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLDS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One accumulator per element adds the products in ascending order on tensor cores; then the epilogue.

    With GROUPED "rows", each group of rows has its own entry of the weights; with "depth", each entry of the result is
    the sum over the rows of a group. With SPLITS, as many accumulators add parts of K and are added as a binary tree.
    """
    if GROUPED == "rows":  # each group, and the rows without one, may end in a tile that is not full
        row_tiles = tl.minimum(rows, (rows + (GROUPS + 1) * (TILE_ROWS - 1)) // TILE_ROWS)
    else:
        row_tiles = tl.cdiv(rows, TILE_ROWS)
    entry, row_tile, column_tile = _place(row_tiles, COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    first_row = row_tile * TILE_ROWS
    end_row = rows
    length = depth
    if GROUPED == "rows":
        entry, first_row, end_row, is_used, fit = _group_of_tile(
            sizes_ptr, row_tile, rows, TILE_ROWS, GROUPS, GROUPS_BLOCK
        )
        length = tl.where(is_used, depth, 0)
    elif GROUPED == "depth":
        start, length, fit = _rows_of_group(sizes_ptr, entry, depth, GROUPS, GROUPS_BLOCK)
        x_ptr += start * X_DEPTH
        w_ptr += start * W_DEPTH
    r = first_row + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, X_ROW, X_DEPTH, SHARED_X)
    w_offsets = _w_offsets(entry, c, depth, COLUMNS, W_DEPTH, W_COLUMN, SHARED_W)
    steps = tl.arange(0, TILE_DEPTH).to(tl.int64)
    x_ptrs += steps[None, :] * X_DEPTH
    w_offsets += steps[:, None] * W_DEPTH
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    first = tl.zeros((TILE_ROWS, TILE_COLUMNS), sums)
    if GROUPED == "rows":
        y_offsets = r.to(tl.int64)[:, None] * COLUMNS + c[None, :]
    else:
        y_offsets = (entry * rows + r.to(tl.int64))[:, None] * COLUMNS + c[None, :]
    inside = (r < end_row)[:, None] & (c < COLUMNS)[None, :]
    if HAS_TOTAL:
        first = tl.load(total_ptr + y_offsets, mask=inside, other=0.0)
    second = tl.zeros((TILE_ROWS, TILE_COLUMNS), sums)
    in_rows = (r < end_row)[:, None]
    in_columns = (c < COLUMNS)[None, :]
    if SPLITS == 1:
        first, second = _sums(
            first,
            second,
            x_ptrs,
            w_ptr,
            up_ptr,
            w_offsets,
            length,
            in_rows,
            in_columns,
            X_DEPTH,
            W_DEPTH,
            TILE_DEPTH,
            WHOLE_ROWS,
            WHOLE_DEPTH,
            WHOLE_COLUMNS,
            PRECISION,
            FOLDS,
            HAS_UP,
        )
    else:
        zero = first
        for part in tl.static_range(SPLITS):
            begin = part * SPLIT_LENGTH
            chain, _ = _sums(
                zero,
                zero,
                x_ptrs + begin * X_DEPTH,
                w_ptr,
                up_ptr,
                w_offsets + begin * W_DEPTH,
                tl.minimum(depth - begin, SPLIT_LENGTH),
                in_rows,
                in_columns,
                X_DEPTH,
                W_DEPTH,
                TILE_DEPTH,
                WHOLE_ROWS,
                WHOLE_DEPTH,
                WHOLE_COLUMNS,
                PRECISION,
                FOLDS,
                False,
            )
            if part == 0:
                first = chain
            elif part == 1:
                first += chain
            elif part == 2:
                second = chain
            else:
                second += chain
        if SPLITS > 2:
            first += second
    if HAS_SCALES:
        scaled_rows = end_row
        scaled_columns = COLUMNS
        if GROUPED == "rows":  # without a group no scale is read: its product with a sum of zero could be nan
            scaled_rows = tl.where(is_used, end_row, 0)
            scaled_columns = tl.where(is_used, COLUMNS, 0)
        row_scale = tl.load(row_scale_ptr + r, mask=r < scaled_rows, other=0.0)
        column_scale = tl.load(column_scale_ptr + entry * COLUMNS + c, mask=c < scaled_columns, other=0.0)
        first = first.to(tl.float32) * row_scale[:, None] * column_scale.to(tl.float32)[None, :]
    if GROUPED != "":
        first = tl.where(fit, first, float("nan"))
    _finish(
        first,
        second,
        c,
        y_offsets,
        inside,
        bias_ptr,
        residual_ptr,
        y_ptr,
        COLUMNS,
        HAS_UP,
        HAS_BIAS,
        HAS_RESIDUAL,
        ACTIVATION,
    )


@triton.jit
def split_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    rows,
    depth,
    y_ptr,
    COLUMNS: tl.constexpr,
    X_ROW: tl.constexpr,
    X_DEPTH: tl.constexpr,
    W_DEPTH: tl.constexpr,
    W_COLUMN: tl.constexpr,
    SHARED_X: tl.constexpr,
    SHARED_W: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Two or four parts of K are summed at the same time, by different warps, and added as a binary tree."""
    entry, row_tile, column_tile = _place(tl.cdiv(rows, TILE_ROWS), COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    r = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, X_ROW, X_DEPTH, SHARED_X)
    w_offsets = _w_offsets(entry, c, depth, COLUMNS, W_DEPTH, W_COLUMN, SHARED_W)
    starts = tl.arange(0, SPLITS) * SPLIT_LENGTH
    sums = tl.zeros((SPLITS, TILE_ROWS, TILE_COLUMNS), tl.float32)
    for k in range(0, SPLIT_LENGTH, TILE_DEPTH):
        d = starts[:, None] + (k + tl.arange(0, TILE_DEPTH))[None, :]
        wide = d.to(tl.int64)
        in_depth = d < depth
        x = _tile(
            x_ptrs[None, :, :] + wide[:, None, :] * X_DEPTH,
            in_depth[:, None, :],
            in_depth[:, None, :],
            WHOLE_DEPTH,
            True,
        )
        w_ptrs = w_ptr + w_offsets[None, :, :] + wide[:, :, None] * W_DEPTH
        w = _tile(w_ptrs, in_depth[:, :, None], (c < COLUMNS)[None, None, :], WHOLE_DEPTH, WHOLE_COLUMNS)
        sums = tl.dot(x, w, sums, input_precision="ieee", max_num_imprecise_acc=0, out_dtype=tl.float32)
    by_element = tl.permute(sums, (1, 2, 0))
    if SPLITS == 4:
        even, odd = tl.split(tl.reshape(by_element, (TILE_ROWS, TILE_COLUMNS, 2, 2)))
        by_element = even + odd
    left, right = tl.split(by_element)
    first = left + right
    y_offsets = (entry * rows + r.to(tl.int64))[:, None] * COLUMNS + c[None, :]
    inside = (r < rows)[:, None] & (c < COLUMNS)[None, :]
    _finish(
        first,
        first,
        c,
        y_offsets,
        inside,
        bias_ptr,
        residual_ptr,
        y_ptr,
        COLUMNS,
        False,
        HAS_BIAS,
        HAS_RESIDUAL,
        ACTIVATION,
    )


@triton.jit
def chain_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    total_ptr,
    rows,
    depth,
    y_ptr,
    COLUMNS: tl.constexpr,
    X_ROW: tl.constexpr,
    X_DEPTH: tl.constexpr,
    W_DEPTH: tl.constexpr,
    W_COLUMN: tl.constexpr,
    SHARED_X: tl.constexpr,
    SHARED_W: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
):
    """Blocks of the sum are chains of fused multiply-adds, which are added in ascending order."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    entry, row_tile, column_tile = _place(tl.cdiv(rows, TILE_ROWS), COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    r = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, X_ROW, X_DEPTH, SHARED_X)
    w_offsets = _w_offsets(entry, c, depth, COLUMNS, W_DEPTH, W_COLUMN, SHARED_W)
    y_offsets = (entry * rows + r.to(tl.int64))[:, None] * COLUMNS + c[None, :]
    inside = (r < rows)[:, None] & (c < COLUMNS)[None, :]
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype)
    if HAS_TOTAL:
        total = tl.load(total_ptr + y_offsets, mask=inside, other=0.0)
    for start in range(0, depth, BLOCK):
        end = tl.minimum(start + BLOCK, depth)
        chain = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype)
        for k in range(start, end, TILE_DEPTH):
            d = k + tl.arange(0, TILE_DEPTH)
            x_mask = (d < end)[None, :] & (r < rows)[:, None]
            w_mask = (d < end)[:, None] & (c < COLUMNS)[None, :]
            x = tl.load(x_ptrs + d.to(tl.int64)[None, :] * X_DEPTH, mask=x_mask, other=0.0).to(dtype)
            w_ptrs = w_ptr + w_offsets + d.to(tl.int64)[:, None] * W_DEPTH
            w = tl.load(w_ptrs, mask=w_mask, other=0.0).to(dtype)
            chain = tl.dot(x, w, chain, input_precision="ieee", max_num_imprecise_acc=0, out_dtype=dtype)
        added = total + chain
        # Starting at zero would lose the sign of a first block of -0.
        total = added if FROM_ZERO else tl.where(start == 0, chain, added)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, mask=c < COLUMNS, other=0.0).to(tl.float32).to(dtype)[None, :]
    tl.store(y_ptr + y_offsets, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    first,
    second,
    x_ptrs,
    w_ptr,
    up_ptr,
    w_offsets,
    length,
    in_rows,
    in_columns,
    X_DEPTH: tl.constexpr,
    W_DEPTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLDS: tl.constexpr,
    HAS_UP: tl.constexpr,
):
    """Returns the sums of a tile, continued by `length` products of each element, of one or two weights.

    With FOLDS, each tile of the depth has an accumulator of its own in the tensor core, which is then added.
    """
    sums: tl.constexpr = first.dtype
    for k in range(0, length, TILE_DEPTH):
        d = k + tl.arange(0, TILE_DEPTH)
        x = _tile(x_ptrs, d[None, :] < length, in_rows, WHOLE_DEPTH, WHOLE_ROWS)
        w = _tile(w_ptr + w_offsets, d[:, None] < length, in_columns, WHOLE_DEPTH, WHOLE_COLUMNS)
        if FOLDS:
            first += tl.dot(x, w, max_num_imprecise_acc=TILE_DEPTH, out_dtype=sums)
        else:
            first = tl.dot(x, w, first, input_precision=PRECISION, max_num_imprecise_acc=0, out_dtype=sums)
        if HAS_UP:
            up = _tile(up_ptr + w_offsets, d[:, None] < length, in_columns, WHOLE_DEPTH, WHOLE_COLUMNS)
            second = tl.dot(x, up, second, input_precision=PRECISION, max_num_imprecise_acc=0, out_dtype=sums)
        x_ptrs += TILE_DEPTH * X_DEPTH
        w_offsets += TILE_DEPTH * W_DEPTH
    return first, second


@triton.jit
def _finish(
    first,
    second,
    c,
    y_offsets,
    inside,
    bias_ptr,
    residual_ptr,
    y_ptr,
    COLUMNS: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Adds the bias, applies the activation, multiplies by the second product, adds the residual, and stores."""
    if HAS_BIAS:
        first += tl.load(bias_ptr + c, mask=c < COLUMNS, other=0.0).to(tl.float32)[None, :]
    first = activate(first, ACTIVATION)
    if HAS_UP:
        first = first * second
    if HAS_RESIDUAL:
        first += tl.load(residual_ptr + y_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offsets, first.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _group_of_tile(
    sizes_ptr, row_tile, rows, TILE_ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr
):
    """Returns the group of a tile of rows, its first row, the end of its rows, whether it is one, and if sizes fit.

    The tiles of rows without a group come last. If sizes are negative or add up to more than `rows`, no row has one.
    """
    g = tl.arange(0, GROUPS_BLOCK)
    sizes, fit = _sizes(sizes_ptr, g, rows, GROUPS)
    tiles = tl.cdiv(sizes, TILE_ROWS)
    group = tl.sum((tl.cumsum(tiles, 0) <= row_tile).to(tl.int32), 0)
    before = tl.where(g < group, sizes, 0)
    start = tl.sum(before, 0)  # the number of rows with a group, for a tile without one
    first = start + (row_tile - tl.sum(tl.where(g < group, tiles, 0), 0)) * TILE_ROWS
    is_used = group < GROUPS_BLOCK
    end = tl.where(is_used, start + tl.sum(tl.where(g == group, sizes, 0), 0), rows)
    return tl.where(is_used, group, 0).to(tl.int64), first, end, is_used, fit


@triton.jit
def _rows_of_group(sizes_ptr, group, rows, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """Returns the first row of a group, its number of rows, and whether the sizes of the groups fit."""
    g = tl.arange(0, GROUPS_BLOCK)
    sizes, fit = _sizes(sizes_ptr, g, rows, GROUPS)
    start = tl.sum(tl.where(g < group, sizes, 0), 0)
    return start.to(tl.int64), tl.sum(tl.where(g == group, sizes, 0), 0), fit


@triton.jit
def _sizes(sizes_ptr, g, rows, GROUPS: tl.constexpr):
    """Returns the sizes of the groups, and whether they fit; zeros if they do not."""
    sizes = tl.load(sizes_ptr + g, mask=g < GROUPS, other=0)
    possible = (sizes >= 0) & (sizes <= rows)
    total = tl.sum(tl.where(possible, sizes, rows + 1).to(tl.int64), 0)
    fit = total <= rows
    return tl.where(fit, sizes, 0), fit


@triton.jit
def _place(row_tiles, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Returns the entry of the stack, the row of tiles and the column of tiles of this program.

    Consecutive programs compute neighbouring tiles, GROUP rows of tiles at a time, and so share operands in the cache.
    """
    column_tiles: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    index = tl.program_id(0)
    entry = index // (row_tiles * column_tiles)
    index = index % (row_tiles * column_tiles)
    group = index // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = index % (GROUP * column_tiles)
    return entry.to(tl.int64), group * GROUP + within % height, within // height


@triton.jit
def _x_pointers(
    x_ptr,
    entry,
    r,
    rows,
    depth,
    X_ROW: tl.constexpr,
    X_DEPTH: tl.constexpr,
    SHARED_X: tl.constexpr,
):
    """Returns pointers to the first element of each row of x, as a column.

    Rows outside of the array are replaced by the first one where rows are apart in memory, so that their loads need no
    mask; where they are neighbours, that would keep the loads from being wide. With few rows they have one all the
    same: programs that all read the same row again and again wait for each other.
    """
    if not SHARED_X:  # multiplied here, where the compiler sees that the product is a multiple of the stride
        # `tl.cast` and not `.to`: a size of 1 is a Python integer here.
        x_ptr += entry * (tl.cast(rows, tl.int64) * X_ROW if X_DEPTH == 1 else tl.cast(depth, tl.int64) * X_DEPTH)
    if X_ROW != 1:
        r = tl.where(r < rows, r, 0)
    return x_ptr + r.to(tl.int64)[:, None] * X_ROW


@triton.jit
def _w_offsets(
    entry,
    c,
    depth,
    COLUMNS: tl.constexpr,
    W_DEPTH: tl.constexpr,
    W_COLUMN: tl.constexpr,
    SHARED_W: tl.constexpr,
):
    """Returns the offsets of the first element of each column of weights, as a row; see `_x_pointers`."""
    if W_COLUMN != 1:
        c = tl.where(c < COLUMNS, c, 0)
    offsets = c.to(tl.int64)[None, :] * W_COLUMN
    if not SHARED_W:
        offsets += entry * (tl.cast(depth, tl.int64) * W_DEPTH if W_COLUMN == 1 else COLUMNS * W_COLUMN)
    return offsets


@triton.jit
def _tile(pointers, in_depth, in_width, WHOLE_DEPTH: tl.constexpr, WHOLE_WIDTH: tl.constexpr):
    """Loads a tile; elements outside of the array are zero."""
    if WHOLE_DEPTH and WHOLE_WIDTH:
        tile = tl.load(pointers)
    elif WHOLE_DEPTH:
        tile = tl.load(pointers, mask=in_width, other=0.0)
    elif WHOLE_WIDTH:
        tile = tl.load(pointers, mask=in_depth, other=0.0)
    else:
        tile = tl.load(pointers, mask=in_depth & in_width, other=0.0)
    return tile
