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
    form: tl.constexpr,
):
    """One accumulator per element adds the products in ascending order on tensor cores; then the epilogue.

    With groups of rows, each group has its own entry of the weights; with groups of the depth, each entry of the result
    is the sum over the rows of a group. With splits, as many accumulators add parts of K and are added as a binary
    tree.
    """
    TILE_ROWS: tl.constexpr = form.tile_rows
    TILE_COLUMNS: tl.constexpr = form.tile_columns
    if form.grouped == "rows":  # each group, and the rows without one, may end in a tile that is not full
        row_tiles = tl.minimum(rows, (rows + (form.groups + 1) * (TILE_ROWS - 1)) // TILE_ROWS)
    else:
        row_tiles = tl.cdiv(rows, TILE_ROWS)
    entry, row_tile, column_tile = _place(row_tiles, form)
    first_row = row_tile * TILE_ROWS
    end_row = rows
    length = depth
    is_used = True
    if form.grouped == "rows":
        entry, first_row, end_row, is_used, fit = _group_of_tile(sizes_ptr, row_tile, rows, form)
        length = tl.where(is_used, depth, 0)
    elif form.grouped == "depth":
        start, length, fit = _rows_of_group(sizes_ptr, entry, depth, form)
        x_ptr += start * form.x_depth
        w_ptr += start * form.w_depth
    r = first_row + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, form)
    w_offsets = _w_offsets(entry, c, depth, form)
    steps = tl.arange(0, form.tile_depth).to(tl.int64)
    x_ptrs += steps[None, :] * form.x_depth
    w_offsets += steps[:, None] * form.w_depth
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    first = tl.zeros((TILE_ROWS, TILE_COLUMNS), sums)
    if form.grouped == "rows":
        y_offsets = r.to(tl.int64)[:, None] * form.columns + c[None, :]
    else:
        y_offsets = (entry * rows + r.to(tl.int64))[:, None] * form.columns + c[None, :]
    inside = (r < end_row)[:, None] & (c < form.columns)[None, :]
    if form.has_total:
        first = tl.load(total_ptr + y_offsets, mask=inside, other=0.0)
    second = tl.zeros((TILE_ROWS, TILE_COLUMNS), sums)
    edges = ((r < end_row)[:, None], (c < form.columns)[None, :])
    if form.splits == 1:
        weights = (w_ptr, up_ptr)
        HAS_UP: tl.constexpr = form.has_up
        first, second = _sums((first, second), x_ptrs, weights, w_offsets, length, edges, HAS_UP, form)
    else:
        first, second = _split_sums(first, second, x_ptrs, w_ptr, w_offsets, depth, edges, form)
    if form.has_scales:
        first = _scaled(first, row_scale_ptr, column_scale_ptr, entry, (r, c), end_row, is_used, form)
    if form.grouped != "":
        first = tl.where(fit, first, float("nan"))
    _finish((first, second), c, y_offsets, inside, bias_ptr, residual_ptr, y_ptr, form)


@triton.jit
def split_kernel(x_ptr, w_ptr, bias_ptr, residual_ptr, rows, depth, y_ptr, form: tl.constexpr):
    """Two or four parts of K are summed at the same time, by different warps, and added as a binary tree."""
    TILE_ROWS: tl.constexpr = form.tile_rows
    TILE_COLUMNS: tl.constexpr = form.tile_columns
    TILE_DEPTH: tl.constexpr = form.tile_depth
    WHOLE: tl.constexpr = form.whole_depth
    WHOLE_COLUMNS: tl.constexpr = form.whole_columns
    entry, row_tile, column_tile = _place(tl.cdiv(rows, TILE_ROWS), form)
    r = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, form)
    w_offsets = _w_offsets(entry, c, depth, form)
    starts = tl.arange(0, form.splits) * form.split_length
    SPLITS: tl.constexpr = form.splits
    sums = tl.zeros((SPLITS, TILE_ROWS, TILE_COLUMNS), tl.float32)
    for k in range(0, form.split_length, TILE_DEPTH):
        d = starts[:, None] + (k + tl.arange(0, TILE_DEPTH))[None, :]
        wide = d.to(tl.int64)
        in_depth = d < depth
        wide_x_ptrs = x_ptrs[None, :, :] + wide[:, None, :] * form.x_depth
        x = _tile(wide_x_ptrs, in_depth[:, None, :], in_depth[:, None, :], WHOLE, True)
        w_ptrs = w_ptr + w_offsets[None, :, :] + wide[:, :, None] * form.w_depth
        w = _tile(w_ptrs, in_depth[:, :, None], (c < form.columns)[None, None, :], WHOLE, WHOLE_COLUMNS)
        sums = tl.dot(x, w, sums, input_precision="ieee", max_num_imprecise_acc=0, out_dtype=tl.float32)
    by_element = tl.permute(sums, (1, 2, 0))
    if form.splits == 4:
        even, odd = tl.split(tl.reshape(by_element, (TILE_ROWS, TILE_COLUMNS, 2, 2)))
        by_element = even + odd
    left, right = tl.split(by_element)
    first = left + right
    y_offsets = (entry * rows + r.to(tl.int64))[:, None] * form.columns + c[None, :]
    inside = (r < rows)[:, None] & (c < form.columns)[None, :]
    _finish((first, first), c, y_offsets, inside, bias_ptr, residual_ptr, y_ptr, form)


@triton.jit
def chain_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    total_ptr,
    rows,
    depth,
    y_ptr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    form: tl.constexpr,
):
    """Blocks of the sum are chains of fused multiply-adds, which are added in ascending order."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    TILE_ROWS: tl.constexpr = form.tile_rows
    TILE_COLUMNS: tl.constexpr = form.tile_columns
    entry, row_tile, column_tile = _place(tl.cdiv(rows, TILE_ROWS), form)
    r = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, form)
    w_offsets = _w_offsets(entry, c, depth, form)
    y_offsets = (entry * rows + r.to(tl.int64))[:, None] * form.columns + c[None, :]
    inside = (r < rows)[:, None] & (c < form.columns)[None, :]
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype)
    if form.has_total:
        total = tl.load(total_ptr + y_offsets, mask=inside, other=0.0)
    for start in range(0, depth, BLOCK):
        end = tl.minimum(start + BLOCK, depth)
        chain = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype)
        for k in range(start, end, form.tile_depth):
            d = k + tl.arange(0, form.tile_depth)
            x_mask = (d < end)[None, :] & (r < rows)[:, None]
            w_mask = (d < end)[:, None] & (c < form.columns)[None, :]
            x = tl.load(x_ptrs + d.to(tl.int64)[None, :] * form.x_depth, mask=x_mask, other=0.0).to(dtype)
            w_ptrs = w_ptr + w_offsets + d.to(tl.int64)[:, None] * form.w_depth
            w = tl.load(w_ptrs, mask=w_mask, other=0.0).to(dtype)
            chain = tl.dot(x, w, chain, input_precision="ieee", max_num_imprecise_acc=0, out_dtype=dtype)
        added = total + chain
        # Starting at zero would lose the sign of a first block of -0.
        total = added if FROM_ZERO else tl.where(start == 0, chain, added)
    if form.has_bias:
        total += tl.load(bias_ptr + c, mask=c < form.columns, other=0.0).to(tl.float32).to(dtype)[None, :]
    tl.store(y_ptr + y_offsets, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums(totals, x_ptrs, weights, w_offsets, length, edges, HAS_UP: tl.constexpr, form: tl.constexpr):
    """Returns the sums of a tile, continued by `length` products of each element, of one or two weights.

    If the form folds, each tile of the depth has an accumulator of its own in the tensor core, which is then added.
    """
    first = totals[0]
    second = totals[1]
    in_rows = edges[0]
    in_columns = edges[1]
    sums: tl.constexpr = first.dtype
    TILE_DEPTH: tl.constexpr = form.tile_depth
    WHOLE: tl.constexpr = form.whole_depth
    WHOLE_ROWS: tl.constexpr = form.whole_rows
    WHOLE_COLUMNS: tl.constexpr = form.whole_columns
    for k in range(0, length, TILE_DEPTH):
        d = k + tl.arange(0, TILE_DEPTH)
        x = _tile(x_ptrs, d[None, :] < length, in_rows, WHOLE, WHOLE_ROWS)
        w = _tile(weights[0] + w_offsets, d[:, None] < length, in_columns, WHOLE, WHOLE_COLUMNS)
        if form.folds:
            first += tl.dot(x, w, max_num_imprecise_acc=TILE_DEPTH, out_dtype=sums)
        else:
            first = tl.dot(x, w, first, input_precision=form.precision, max_num_imprecise_acc=0, out_dtype=sums)
        if HAS_UP:
            up = _tile(weights[1] + w_offsets, d[:, None] < length, in_columns, WHOLE, WHOLE_COLUMNS)
            second = tl.dot(x, up, second, input_precision=form.precision, max_num_imprecise_acc=0, out_dtype=sums)
        x_ptrs += TILE_DEPTH * form.x_depth
        w_offsets += TILE_DEPTH * form.w_depth
    return first, second


@triton.jit
def _split_sums(first, second, x_ptrs, w_ptr, w_offsets, depth, edges, form: tl.constexpr):
    """Returns the sums of the parts of K, added as a binary tree, and another tile."""
    SPLITS: tl.constexpr = form.splits
    SPLIT_LENGTH: tl.constexpr = form.split_length
    zero = first
    for part in tl.static_range(SPLITS):
        begin = part * SPLIT_LENGTH
        x_part = x_ptrs + begin * form.x_depth
        w_part = w_offsets + begin * form.w_depth
        length = tl.minimum(depth - begin, SPLIT_LENGTH)
        chain, _ = _sums((zero, zero), x_part, (w_ptr, w_ptr), w_part, length, edges, False, form)
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
    return first, second


@triton.jit
def _scaled(sums, row_scale_ptr, column_scale_ptr, entry, places, end_row, is_used, form: tl.constexpr):
    """Returns sums times the scales of their rows and columns."""
    r, c = places
    scaled_rows = end_row
    scaled_columns = form.columns
    if form.grouped == "rows":  # without a group no scale is read: its product with a sum of zero could be nan
        scaled_rows = tl.where(is_used, end_row, 0)
        scaled_columns = tl.where(is_used, form.columns, 0)
    row_scale = tl.load(row_scale_ptr + r, mask=r < scaled_rows, other=0.0)
    column_scale = tl.load(column_scale_ptr + entry * form.columns + c, mask=c < scaled_columns, other=0.0)
    return sums.to(tl.float32) * row_scale[:, None] * column_scale.to(tl.float32)[None, :]


@triton.jit
def _finish(products, c, y_offsets, inside, bias_ptr, residual_ptr, y_ptr, form: tl.constexpr):
    """Adds the bias, applies the activation, multiplies by the second product, adds the residual, and stores."""
    first = products[0]
    if form.has_bias:
        first += tl.load(bias_ptr + c, mask=c < form.columns, other=0.0).to(tl.float32)[None, :]
    ACTIVATION: tl.constexpr = form.activation
    first = activate(first, ACTIVATION)
    if form.has_up:
        first = first * products[1]
    if form.has_residual:
        first += tl.load(residual_ptr + y_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offsets, first.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _group_of_tile(sizes_ptr, row_tile, rows, form: tl.constexpr):
    """Returns the group of a tile of rows, its first row, the end of its rows, whether it is one, and if sizes fit.

    The tiles of rows without a group come last. If sizes are negative or add up to more than `rows`, no row has one.
    """
    g = tl.arange(0, form.groups_block)
    GROUPS: tl.constexpr = form.groups
    sizes, fit = _sizes(sizes_ptr, g, rows, GROUPS)
    tiles = tl.cdiv(sizes, form.tile_rows)
    group = tl.sum((tl.cumsum(tiles, 0) <= row_tile).to(tl.int32), 0)
    before = tl.where(g < group, sizes, 0)
    start = tl.sum(before, 0)  # the number of rows with a group, for a tile without one
    first = start + (row_tile - tl.sum(tl.where(g < group, tiles, 0), 0)) * form.tile_rows
    is_used = group < form.groups_block
    end = tl.where(is_used, start + tl.sum(tl.where(g == group, sizes, 0), 0), rows)
    return tl.where(is_used, group, 0).to(tl.int64), first, end, is_used, fit


@triton.jit
def _rows_of_group(sizes_ptr, group, rows, form: tl.constexpr):
    """Returns the first row of a group, its number of rows, and whether the sizes of the groups fit."""
    g = tl.arange(0, form.groups_block)
    GROUPS: tl.constexpr = form.groups
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
def _place(row_tiles, form: tl.constexpr):
    """Returns the entry of the stack, the row of tiles and the column of tiles of this program.

    Consecutive programs compute neighbouring tiles, GROUP rows of tiles at a time, and so share operands in the cache.
    """
    column_tiles: tl.constexpr = (form.columns + form.tile_columns - 1) // form.tile_columns
    GROUP: tl.constexpr = form.group
    index = tl.program_id(0)
    entry = index // (row_tiles * column_tiles)
    index = index % (row_tiles * column_tiles)
    group = index // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = index % (GROUP * column_tiles)
    return entry.to(tl.int64), group * GROUP + within % height, within // height


@triton.jit
def _x_pointers(x_ptr, entry, r, rows, depth, form: tl.constexpr):
    """Returns pointers to the first element of each row of x, as a column.

    Rows outside of the array are replaced by the first one where rows are apart in memory, so that their loads need no
    mask; where they are neighbours, that would keep the loads from being wide. With few rows they have one all the
    same: programs that all read the same row again and again wait for each other.
    """
    if not form.shared_x:  # multiplied here, where the compiler sees that the product is a multiple of the stride
        # `tl.cast` and not `.to`: a size of 1 is a Python integer here.
        x_ptr += entry * (
            tl.cast(rows, tl.int64) * form.x_row if form.x_depth == 1 else tl.cast(depth, tl.int64) * form.x_depth
        )
    if form.x_row != 1:
        r = tl.where(r < rows, r, 0)
    return x_ptr + r.to(tl.int64)[:, None] * form.x_row


@triton.jit
def _w_offsets(entry, c, depth, form: tl.constexpr):
    """Returns the offsets of the first element of each column of weights, as a row; see `_x_pointers`."""
    if form.w_column != 1:
        c = tl.where(c < form.columns, c, 0)
    offsets = c.to(tl.int64)[None, :] * form.w_column
    if not form.shared_w:
        offsets += entry * (
            tl.cast(depth, tl.int64) * form.w_depth if form.w_column == 1 else form.columns * form.w_column
        )
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
