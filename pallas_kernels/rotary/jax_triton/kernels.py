"""Body of the Triton kernel that rotates queries and keys and stores keys and values: one token per program."""

import triton
import triton.language as tl


@triton.jit
def rotate_and_store_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    source_ptr,
    given_keys_ptr,
    given_values_ptr,
    stored,
    query_ptr,
    keys_ptr,
    values_ptr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_SOURCE: tl.constexpr,
    WIDTH: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
):
    """Rotates the heads of a token; stores its keys and values in its row of the caches, if there is such a row.

    The heads are in GROUPS groups, each with queries, keys and values in turn, and those to rotate in OF_SOURCE. The
    caches are updated in place, so the parameters of the given ones are not used.
    """
    HALF: tl.constexpr = WIDTH // 2
    ROTATED: tl.constexpr = QUERY_HEADS + KEY_HEADS
    GROUP: tl.constexpr = (ROTATED + KEY_HEADS) // GROUPS
    SOURCE_GROUP: tl.constexpr = SOURCE_COLUMNS // WIDTH // OF_SOURCE
    VALUES: tl.constexpr = KEY_HEADS // GROUPS * WIDTH
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token)
    heads_ptr += token * ((ROTATED + KEY_HEADS) * WIDTH)
    source_ptr += token * SOURCE_COLUMNS
    cos_ptr += token * HALF
    sin_ptr += token * HALF
    # All loads of a token are issued before the first store.
    column = tl.arange(0, OF_VALUES)
    there = column < KEY_HEADS * WIDTH
    values = tl.load(
        heads_ptr + ROTATED // GROUPS * WIDTH + _in_groups(column, VALUES, GROUP * WIDTH, GROUPS), mask=there
    )
    q_low, q_high, q_place, q_there = _rotated(
        source_ptr, cos_ptr, sin_ptr, QUERY_HEADS, WIDTH, OF_QUERIES, SOURCE_GROUP, OF_SOURCE
    )
    source_ptr += QUERY_HEADS // OF_SOURCE * WIDTH
    k_low, k_high, k_place, k_there = _rotated(
        source_ptr, cos_ptr, sin_ptr, KEY_HEADS, WIDTH, OF_KEYS, SOURCE_GROUP, OF_SOURCE
    )
    query_ptr += token * (QUERY_HEADS * WIDTH)
    keys_ptr += row.to(tl.int64) * (KEY_HEADS * WIDTH)
    values_ptr += row.to(tl.int64) * (KEY_HEADS * WIDTH)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    tl.store(query_ptr + q_place, q_low.to(dtype), mask=q_there)
    tl.store(query_ptr + HALF + q_place, q_high.to(dtype), mask=q_there)
    if (row >= 0) & (row < stored):
        tl.store(keys_ptr + k_place, k_low.to(dtype), mask=k_there)
        tl.store(keys_ptr + HALF + k_place, k_high.to(dtype), mask=k_there)
        tl.store(values_ptr + column, values, mask=there)


@triton.jit
def _in_groups(column, OWN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the places of columns of which each group of GROUP columns has OWN in turn."""
    if GROUPS > 1:
        column = column // OWN * GROUP + column % OWN
    return column


@triton.jit
def _rotated(
    source_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Returns both rotated halves of some heads, the offsets of the first halves, and which of these exist.

    The products are rounded before the sums: the launch does not let the compiler fuse them.
    """
    HALF: tl.constexpr = WIDTH // 2
    pair = tl.arange(0, SIZE)
    there = pair < HEADS * HALF
    angle = pair % HALF
    place = pair // HALF * WIDTH + angle
    source = _in_groups(place, HEADS // GROUPS * WIDTH, GROUP * WIDTH, GROUPS)
    low = tl.load(source_ptr + source, mask=there).to(tl.float32)
    high = tl.load(source_ptr + HALF + source, mask=there).to(tl.float32)
    c = tl.load(cos_ptr + angle, mask=there)
    s = tl.load(sin_ptr + angle, mask=there)
    return low * c - high * s, high * c + low * s, place, there
