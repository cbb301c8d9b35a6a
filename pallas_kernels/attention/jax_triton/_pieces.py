"""Heads in pieces: how they are read, cut into limbs, multiplied and written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import is_finite, opaque_16, product
from pallas_kernels.attention.jax_triton._tile import Keys, Rows


@triton.constexpr_function
def piece_count(size: int, widest: int) -> int:
    """Returns into how many pieces a head is cut: a Triton tensor has a power-of-two width."""
    count = 0
    while size:
        size -= min(widest, 1 << (size.bit_length() - 1))
        count += 1
    return count


@triton.constexpr_function
def piece_start(size: int, widest: int, index: int) -> int:
    """Returns where a piece of a head starts."""
    start = 0
    for _ in range(index):
        start += min(widest, 1 << ((size - start).bit_length() - 1))
    return start


@triton.constexpr_function
def piece_width(size: int, widest: int, index: int) -> int:
    """Returns the width of a piece of a head."""
    start = 0
    for _ in range(index):
        start += min(widest, 1 << ((size - start).bit_length() - 1))
    return min(widest, 1 << ((size - start).bit_length() - 1))


@triton.jit
def float_of_e4m3(bits):
    """Returns the float32 values of float8_e4m3fn numbers, passed as int8: not every GPU has instructions for them."""
    pattern = bits.to(tl.int32) & 0xFF
    size = pattern & 0x7F
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * 0.001953125
    value = tl.where(size < 8, small, tl.where(size == 0x7F, float("nan"), normal))
    return tl.where(pattern > 0x7F, -value, value)


class Heads(NamedTuple):
    """Where heads start.

    Attributes:
        first: A pointer.
        following: (n,) integers, the start of each head relative to `first`.
    """

    first: Any
    following: Any


@triton.jit
def places(heads: Heads, size: tl.constexpr, index: tl.constexpr, form: tl.constexpr):
    """Returns pointers (n, width) to a piece of heads. A loop that moves `first` keeps what is added to it."""
    START: tl.constexpr = piece_start(size, form.widest_piece, index)
    WIDTH: tl.constexpr = piece_width(size, form.widest_piece, index)
    return heads.first + (heads.following[:, None] + (START + tl.arange(0, WIDTH))[None, :])


@triton.jit
def limbs_unless(heads: Heads, bad, size: tl.constexpr, index: tl.constexpr, SOME: tl.constexpr, form: tl.constexpr):
    """Reads the limbs of a piece, with zeros for the heads that are `bad`, of which there may be `SOME`."""
    if SOME:
        x = tl.load(places(heads, size, index, form), mask=(bad == 0)[:, None], other=0)
    else:
        x = tl.load(places(heads, size, index, form))
    return limbs_of_keys(x, form)


@triton.jit
def not_finite(heads: Heads, COUNT: tl.constexpr, size: tl.constexpr, form: tl.constexpr):
    """Returns which of COUNT heads are not finite throughout."""
    PIECES: tl.constexpr = piece_count(size, form.widest_piece)
    bad = tl.zeros((COUNT,), tl.int32)
    for i in tl.static_range(PIECES):
        # A volatile read stays apart from the one for the products, and is not kept in registers for it.
        piece = number(tl.load(places(heads, size, i, form), volatile=True), form)
        bad = tl.maximum(bad, tl.max(tl.where(is_finite(piece.to(tl.float32)), 0, 1), 1))
    return bad > 0


@triton.jit
def limbs(x, form: tl.constexpr):
    """Returns what the tensor core multiplies: numbers of 16 bits, or three bfloat16 that add up to a float32."""
    if form.dtype == "float32":
        return three_limbs(x)
    elif form.dtype == "bfloat16":
        return (x.to(tl.bfloat16),)
    else:
        return (x.to(tl.float16),)


@triton.jit
def three_limbs(x):
    """Returns three bfloat16 tensors, the largest first, that add up to a float32 one."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def number(x, form: tl.constexpr):
    """Returns stored keys or values as numbers: as they are, or those of 8 bits in units of their contract."""
    if form.stored is None:
        return x
    elif form.stored == "float8_e4m3fn":
        return float_of_e4m3(x) * form.unit
    else:
        return x.to(tl.float32) * form.unit


@triton.jit
def limbs_of_keys(x, form: tl.constexpr):
    """Returns the limbs of stored keys or values."""
    found = limbs(number(x, form), form)
    if form.stored is not None:
        COUNT: tl.constexpr = len(found)
        hidden = ()
        for i in tl.static_range(COUNT):
            hidden = hidden + (opaque_16(found[i]),)
        found = hidden
    return found


@triton.jit
def heads_of_rows(array, rows: Rows, size: tl.constexpr):
    """Returns the heads of rows in (B, T, N, H)."""
    return Heads(array + rows.entry * size, rows.following * size)


@triton.jit
def heads_of_keys(array, keys: Keys, head, size: tl.constexpr, form: tl.constexpr):
    """Returns the heads of keys or of their gradients."""
    return Heads(array + (keys.entry * form.heads + head) * size, keys.following * (form.heads * size))


@triton.jit
def heads_of_values(array, keys: Keys, head, form: tl.constexpr):
    """Returns the heads of values, which may be those of the keys."""
    return heads_of_keys(array, keys, head, form.value_stride, form)


@triton.jit
def limbs_of_all(heads: Heads, size: tl.constexpr, form: tl.constexpr):
    """Reads the limbs of all pieces of queries or cotangents."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (limbs(tl.load(places(heads, size, i, form)), form),)
    return found


@triton.jit
def keys_of_all(heads: Heads, size: tl.constexpr, form: tl.constexpr):
    """Reads the limbs of all pieces of keys or values."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (limbs_of_keys(tl.load(places(heads, size, i, form)), form),)
    return found


@triton.jit
def multiply(chain, a, b):
    """Continues a tensor core chain by one product of 16-bit operands, 16 elements at a time in ascending order."""
    return tl.dot(a, b, chain, input_precision="ieee", max_num_imprecise_acc=0, out_dtype=tl.float32)


@triton.jit
def dot(chain, a, b, form: tl.constexpr):
    """Continues a chain (m, n) over the limbs of a (m, k) and of b (k, n).

    Of the products of limbs, those below the last bit of float32 are left out, and the small ones come first.
    """
    COUNT: tl.constexpr = limb_products(form.dtype)
    for i in tl.static_range(COUNT):
        chain = multiply(chain, a[limb_of(form.dtype, i, 0)], b[limb_of(form.dtype, i, 1)])
    return chain


@triton.jit
def dot_of_heads(rows, keys, COUNT: tl.constexpr, KEYS: tl.constexpr, BY_KEYS: tl.constexpr, form: tl.constexpr):
    """Returns the products (R, n) of rows and keys by the limbs of their pieces: one chain over the whole head.

    Args:
        rows: The limbs (R, width) of each piece of the rows.
        keys: The same of the keys.
        COUNT: R.
        KEYS: n.
        BY_KEYS: Whether to return (n, R), which has the same bits.
        form: The constants.
    """
    PIECES: tl.constexpr = len(rows)
    PRODUCTS: tl.constexpr = limb_products(form.dtype)
    if BY_KEYS:
        chain = tl.zeros((KEYS, COUNT), tl.float32)
    else:
        chain = tl.zeros((COUNT, KEYS), tl.float32)
    for piece in tl.static_range(PIECES):
        for i in tl.static_range(PRODUCTS):
            left = rows[piece][limb_of(form.dtype, i, 0)]
            right = keys[piece][limb_of(form.dtype, i, 1)]
            if BY_KEYS:
                chain = multiply(chain, right, tl.trans(left))
            else:
                chain = multiply(chain, left, tl.trans(right))
    return chain


@triton.constexpr_function
def limb_products(dtype: str) -> int:
    """Returns how many products of limbs a product is."""
    return 6 if dtype == "float32" else 1


@triton.constexpr_function
def limb_of(dtype: str, index: int, operand: int) -> int:
    """Returns which limb of the left operand (0) or of the right one (1) a product takes."""
    return ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))[index][operand] if dtype == "float32" else 0


@triton.jit
def zeros(ROWS: tl.constexpr, size: tl.constexpr, form: tl.constexpr):
    """Returns sums (ROWS, width) of each piece before any product."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, piece_width(size, form.widest_piece, i)), tl.float32),)
    return sums


@triton.jit
def all_finite(sums):
    """Returns whether all sums are finite."""
    bad = 0
    COUNT: tl.constexpr = len(sums)
    for i in tl.static_range(COUNT):
        bad = tl.maximum(bad, tl.max(tl.max(tl.where(is_finite(sums[i]), 0, 1), 1), 0))
    return bad == 0


@triton.jit
def kept(sums, keeps):
    """Returns the sums, or zeros."""
    COUNT: tl.constexpr = len(sums)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.where(keeps, sums[i], 0.0),)
    return found


@triton.jit
def rounded(x, form: tl.constexpr):
    """Returns float32 numbers in the dtype of the results."""
    if form.dtype == "bfloat16":
        return x.to(tl.bfloat16)
    elif form.dtype == "float16":
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def write(heads: Heads, exists, sums, size: tl.constexpr, SCALE: tl.constexpr, form: tl.constexpr):
    """Writes sums times a scale, rounded, a zero as +0, to the heads that exist."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    for i in tl.static_range(COUNT):
        found = sums[i]
        if SCALE is not None:
            found = product(found, SCALE)
        if form.dtype == "float32":
            found = tl.where(found == 0, 0.0, found)
        else:
            found = rounded(found + 0.0, form)  # fewer instructions; another nan, which all are rounded to one
        tl.store(places(heads, size, i, form), found, mask=exists[:, None])
