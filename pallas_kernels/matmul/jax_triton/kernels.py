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
    HAS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One accumulator per element adds the products in ascending order on tensor cores; then the epilogue."""
    entry, row_tile, column_tile = _place(rows, COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    r = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    x_ptrs = _x_pointers(x_ptr, entry, r, rows, depth, X_ROW, X_DEPTH, SHARED_X)
    w_offsets = _w_offsets(entry, c, depth, COLUMNS, W_DEPTH, W_COLUMN, SHARED_W)
    steps = tl.arange(0, TILE_DEPTH).to(tl.int64)
    x_ptrs += steps[None, :] * X_DEPTH
    w_offsets += steps[:, None] * W_DEPTH
    first = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    y_offsets = (entry * rows + r.to(tl.int64))[:, None] * COLUMNS + c[None, :]
    inside = (r < rows)[:, None] & (c < COLUMNS)[None, :]
    if HAS_TOTAL:
        first = tl.load(total_ptr + y_offsets, mask=inside, other=0.0)
    second = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for k in range(0, depth, TILE_DEPTH):
        d = k + tl.arange(0, TILE_DEPTH)
        x = _tile(x_ptrs, d[None, :] < depth, (r < rows)[:, None], WHOLE_DEPTH, WHOLE_ROWS)
        w = _tile(w_ptr + w_offsets, d[:, None] < depth, (c < COLUMNS)[None, :], WHOLE_DEPTH, WHOLE_COLUMNS)
        first = tl.dot(x, w, first, input_precision=PRECISION, max_num_imprecise_acc=0, out_dtype=tl.float32)
        if HAS_UP:
            up = _tile(up_ptr + w_offsets, d[:, None] < depth, (c < COLUMNS)[None, :], WHOLE_DEPTH, WHOLE_COLUMNS)
            second = tl.dot(x, up, second, input_precision=PRECISION, max_num_imprecise_acc=0, out_dtype=tl.float32)
        x_ptrs += TILE_DEPTH * X_DEPTH
        w_offsets += TILE_DEPTH * W_DEPTH
    if HAS_BIAS:
        first += tl.load(bias_ptr + c, mask=c < COLUMNS, other=0.0).to(tl.float32)[None, :]
    first = activate(first, ACTIVATION)
    if HAS_UP:
        first = first * second
    if HAS_RESIDUAL:
        first += tl.load(residual_ptr + y_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offsets, first.to(y_ptr.dtype.element_ty), mask=inside)


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
    entry, row_tile, column_tile = _place(rows, COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
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
def _place(rows, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Returns the entry of the stack, the row of tiles and the column of tiles of this program.

    Consecutive programs compute neighbouring tiles, GROUP rows of tiles at a time, and so share operands in the cache.
    """
    row_tiles = tl.cdiv(rows, TILE_ROWS)
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
    mask; where they are neighbours, that would keep the loads from being wide.
    """
    if not SHARED_X:  # multiplied here, where the compiler sees that the product is a multiple of the stride
        x_ptr += entry * (rows.to(tl.int64) * X_ROW if X_DEPTH == 1 else depth.to(tl.int64) * X_DEPTH)
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
        offsets += entry * (depth.to(tl.int64) * W_DEPTH if W_COLUMN == 1 else COLUMNS * W_COLUMN)
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
