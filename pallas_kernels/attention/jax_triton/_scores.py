"""Scores of rows and keys, with all that is added to them."""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import opaque_32, product, tanh
from pallas_kernels.attention.jax_triton._form import LOG2E as _LOG2E
from pallas_kernels.attention.jax_triton._form import Form
from pallas_kernels.attention.jax_triton._tile import Arrays, Bounds, Keys, Rows

LOG2E = tl.constexpr(_LOG2E)


@triton.jit
def scores(arrays: Arrays, rows: Rows, keys: Keys, total, BY_KEYS: tl.constexpr, form: tl.constexpr):
    """Returns the scores (R, n) of rows and keys, whether or not a key is seen.

    Their factor `form.exponent_factor`, after which they are in units of ln(2), is left to the exponents.

    Args:
        arrays: Holds the bias and the slopes.
        rows: R rows.
        keys: n keys.
        total: (R, n), the products of queries and keys.
        BY_KEYS: Whether the first axis of all tensors is that of the keys.
        form: The constants.

    Returns:
        The scores; the hyperbolic tangents of the soft cap, or the products without one.
    """
    bent = total
    if form.cap is not None:
        bent = tanh(product(total, form.factor))
        total = product(bent, form.cap)
    elif form.exponent_factor == 1.0:
        total = product(total, form.factor)
    if form.bias is not None:
        bias = tl.load(place_of(arrays.optional.bias, rows, keys, arrays, BY_KEYS, "bias", form))
        total = total + product(bias.to(tl.float32), LOG2E)
    if form.slopes is not None:
        slope = product(tl.load(of_heads(arrays.optional.alibi_slopes, rows, form.slopes, form)), LOG2E)
        distance = across(keys.position, BY_KEYS) - along(rows.position, BY_KEYS)
        total = total + product(along(slope, BY_KEYS), distance.to(tl.float32))
    return total, bent


@triton.jit
def which_seen(arrays: Arrays, rows: Rows, bounds: Bounds, keys: Keys, BY_KEYS: tl.constexpr, form: tl.constexpr):
    """Returns which keys the rows see, (R, n)."""
    position = across(keys.position, BY_KEYS)
    seen = (position >= along(bounds.first, BY_KEYS)) & (position < along(bounds.last, BY_KEYS))
    if form.mask is not None:
        mask = tl.load(place_of(arrays.optional.mask, rows, keys, arrays, BY_KEYS, "mask", form))
        seen = seen & (opaque_32(mask.to(tl.int32)) != 0)
    return seen


@triton.jit
def along(x, BY_KEYS: tl.constexpr):
    """Returns a tensor of the rows, to be combined with scores."""
    if BY_KEYS:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def across(x, BY_KEYS: tl.constexpr):
    """Returns a tensor of the keys, to be combined with scores."""
    if BY_KEYS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def of_heads(array, rows: Rows, OF_SEQUENCES: tl.constexpr, form: tl.constexpr):
    """Returns pointers into an array (B or 1, N) for the heads of rows."""
    if OF_SEQUENCES:
        array += rows.sequence * form.query_heads
    return array + rows.query_head


@triton.constexpr_function
def is_long(form: Form, name: str, axis: int) -> bool:
    """Returns whether an axis of the bias or the mask is longer than 1."""
    return bool(getattr(form, name)[axis])


@triton.jit
def place_of(
    array, rows: Rows, keys: Keys, arrays: Arrays, BY_KEYS: tl.constexpr, NAME: tl.constexpr, form: tl.constexpr
):
    """Returns pointers into the bias or the mask, (B or 1, N or 1, T or 1, S or 1), for rows and keys."""
    index = along(rows.query.to(tl.int64) * 0, BY_KEYS)
    if is_long(form, NAME, 0):
        index += rows.sequence
    if is_long(form, NAME, 1):
        index = index * form.query_heads + along(rows.query_head, BY_KEYS)
    if is_long(form, NAME, 2):
        index = index * arrays.sizes.queries + along(rows.query, BY_KEYS)
    if is_long(form, NAME, 3):
        index = index * arrays.sizes.capacity + across(keys.held, BY_KEYS)
    else:
        index = index + across(keys.held * 0, BY_KEYS)
    return array + index
