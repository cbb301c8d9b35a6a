"""The gradients of the cross entropy of a linear layer as a primitive, without an array of all logits.

Two schedules with the same bits, both within the memory of some rows of logits and of their gradients:

- a loop over rows, which adds to the gradient of the weights, a float32 array of their size, in every step;
- a loop over columns of the weights, on GPUs whose products continue a sum over K that waits in memory. A step needs
  the statistics of the rows, which the forward pass has, and adds to the gradient of the rows only, which is smaller.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.contracts import is_recording
from bijax.core.primitive import Arrays, define_kernel
from bijax.dispatch.kernels import run_kernel
from bijax.dispatch.matmul import Product, multiply, sum_products
from pallas_kernels.contract import PartsContract
from pallas_kernels.registry import find_or_none, serves
from pallas_kernels.target import Target

CHUNK: Final = 1024
"""Most rows whose logits exist at a time if they are not few, and as many logits in a step over columns."""

_UNIT: Final = 128
"""Sums of weight gradients may be cut at multiples of this many rows."""

_STEP: Final = 16
"""Rows in a group of limbs, and elements of K at whose multiples a sum may be cut."""

_COLUMNS: Final = 64
"""A step over columns has a multiple of them: a GPU copies narrower rows of its logits' gradient slowly."""

_LOGITS: Final = 1 << 27
"""Logits that may exist at a time even if fewer are in `CHUNK` rows."""

_ROWS: Final = 16384
"""Most rows of a loop over columns: the float32 gradient of their limbs is read and written in every step."""

_LEFT_OUT: Final = -1

_NAMES: Final = ("x", "labels", "m", "log_sum", "g")


def over_rows(
    one: Callable[..., Any], start: Any, most: int, x: jax.Array, codes: jax.Array, *others: jax.Array
) -> Any:
    """Loops over chunks of equal numbers of rows; rows of padding are left out and add nothing to any sum.

    Args:
        one: Maps the state and arrays of a chunk of rows to the state and a tree of arrays with as many rows.
        start: The first state.
        most: Most rows of a chunk.
        x: (M, K).
        codes: (M, 1) of `label_codes`.
        *others: (M, 1).

    Returns:
        The last state and the tree of arrays, with M rows.
    """
    rows = x.shape[0]
    count = max(1, -(-rows // most))
    if count == 1:
        return one(start, (x, codes, *others))
    each = _UNIT * -(-rows // (_UNIT * count))
    given = _padded(count * each, x, codes, *others)
    state, found = lax.scan(one, start, tuple(a.reshape(count, each, a.shape[1]) for a in given))
    return state, jax.tree.map(lambda a: a.reshape(count * each, a.shape[2])[:rows], found)


def rows_at_once(columns: int) -> int:
    """Returns the most rows of a chunk.

    Example:
        >>> rows_at_once(128256), rows_at_once(32000)
        (1024, 4096)
    """
    return max(CHUNK, _LOGITS // max(1, columns) // CHUNK * CHUNK)


def _padded(rows: int, x: jax.Array, codes: jax.Array, *others: jax.Array) -> Arrays:
    """Returns arrays with more rows, which are left out."""
    padding = [(0, rows - x.shape[0]), (0, 0)]
    return (
        jnp.pad(x, padding),
        jnp.pad(codes, padding, constant_values=_LEFT_OUT),
        *(jnp.pad(a, padding) for a in others),
    )


def _gradients(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    codes: jax.Array,
    m: jax.Array,
    log_sum: jax.Array,
    g: jax.Array,
    *,
    z_loss: float,
    product: Product,
) -> Arrays:
    """Returns the gradients of x (M, K) and of w."""
    parts = None if is_recording() else _parts_of(target, x, w, product)
    if parts is None or 0 in (*x.shape, *w.shape):
        return _by_rows(target, x, w, codes, m, log_sum, g, z_loss=z_loss, product=product)
    return _by_columns(target, parts, x, w, codes, m, log_sum, g, z_loss=z_loss, product=product)


def _parts_of(target: Target, x: jax.Array, w: jax.Array, product: Product) -> int | None:
    """Returns the limbs of the logits' gradient, if products with them continue a sum over K; else None."""
    slopes: Any = jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if product.transpose_w else 1]), jnp.float32)
    spec = _transposed(product, x).spec(slopes, w)
    options = {"transpose_w": not product.transpose_w, "bias": None, "out_dtype": x.dtype.name}
    found = find_or_none("matmul", target, spec, slopes, w, **options)
    if found is None or target.backend not in ("", found.kernel.backend):
        return None
    contract = found.contracts.get("contract")
    if not isinstance(contract, PartsContract):
        return None
    return contract.parts if serves("chains_of_parts", target, contract.parts, x, w) else None


def _transposed(product: Product, x: jax.Array) -> Product:
    return replace(product, transpose_w=not product.transpose_w, out_dtype=x.dtype.name)


def _by_rows(
    target: Target, x: jax.Array, w: jax.Array, *of_rows: jax.Array, z_loss: float, product: Product
) -> Arrays:
    columns = w.shape[0 if product.transpose_w else 1]

    def one(total: jax.Array, chunk: Arrays) -> tuple[jax.Array, jax.Array]:
        rows, *others = chunk
        (logits,) = multiply(target, rows, w, product=product)
        given = dict(zip(_NAMES, (logits, *others), strict=True))
        like = partial(run_kernel, "cross_entropy_gradient", Target("cpu"), columns)
        slopes = run_kernel("cross_entropy_gradient", target, columns, like=like, **given, z_loss=z_loss)
        (total,) = sum_products(target, rows, slopes, total, product=product)
        return total, multiply(target, slopes, w, product=_transposed(product, x))[0]

    total, dx = over_rows(one, jnp.zeros(w.shape, jnp.float32), rows_at_once(columns), x, *of_rows)
    return dx, total.astype(w.dtype)


def _by_columns(
    target: Target, parts: int, x: jax.Array, w: jax.Array, *of_rows: jax.Array, z_loss: float, product: Product
) -> Arrays:
    rows = x.shape[0]
    blocks = -(-rows // _ROWS)
    each = _STEP * -(-rows // (_STEP * blocks))
    given = _padded(blocks * each, x, *of_rows)
    block = partial(_block_by_columns, target, parts, w, z_loss=z_loss, product=product)
    if blocks == 1:
        dx, dw = block(None, *given)
        return dx[:rows], dw

    def one(total: jax.Array, rows: Arrays) -> tuple[jax.Array, jax.Array]:
        dx, total = block(total, *rows)
        return total, dx

    split = tuple(a.reshape(blocks, each, a.shape[1]) for a in given)
    total, dx = lax.scan(one, jnp.zeros(w.shape, jnp.float32), split)
    return dx.reshape(blocks * each, -1)[:rows], total.astype(w.dtype)


def _block_by_columns(
    target: Target,
    parts: int,
    w: jax.Array,
    total: jax.Array | None,
    x: jax.Array,
    codes: jax.Array,
    *statistics: jax.Array,
    z_loss: float,
    product: Product,
) -> Arrays:
    """Returns the gradient of x and that of w, added to `total` in float32 if it is given."""
    axis = 0 if product.transpose_w else 1
    columns, dtype = w.shape[axis], w.dtype if total is None else jnp.float32
    pairs = jnp.broadcast_to(x.reshape(-1, 1, _STEP, x.shape[1]), (x.shape[0] // _STEP, parts, _STEP, x.shape[1]))
    pairs = pairs.reshape(-1, x.shape[1])

    @jax.jit  # lowered once for all steps of one width
    def step(part: jax.Array, previous: jax.Array | None, places: jax.Array, chains: jax.Array) -> Arrays:
        (logits,) = multiply(target, x, part, product=product)
        slopes = run_kernel(
            "cross_entropy_gradient_of_parts",
            target,
            parts,
            logits,
            codes,
            places,
            *statistics,
            columns=columns,
            z_loss=z_loss,
        )
        dw = run_kernel(
            "weight_gradient_of_parts",
            target,
            parts,
            slopes,
            pairs,
            paired=True,
            transpose=not product.transpose_w,
            accumulate=previous,
            out_dtype=dtype,
        )
        return (
            run_kernel("chains_of_parts", target, parts, slopes, part, chains, transpose_w=not product.transpose_w),
            dw,
        )

    count, width = columns_at_once(columns, x.shape[0])
    steps = [(i * width, width) for i in range(count)]
    if count * width < columns:
        steps.append((count * width, columns - count * width))
    chains, gradients = jnp.zeros((parts * x.shape[0], x.shape[1]), jnp.float32), []
    # No loop: it would copy its state in every step, as no kernel writes its result over an operand.
    for first, wide in steps:
        part = lax.slice_in_dim(w, first, first + wide, axis=axis)
        previous = None if total is None else lax.slice_in_dim(total, first, first + wide, axis=axis)
        # After the step before, or the logits of several steps would exist at a time.
        part, chains = lax.optimization_barrier((part, chains))
        chains, dw = step(part, previous, codes - first, chains)
        gradients.append(dw)
    dx = run_kernel("add_chains", target, parts, chains, out_dtype=x.dtype)
    return dx, gradients[0] if len(gradients) == 1 else jnp.concatenate(gradients, axis)


def columns_at_once(columns: int, rows: int) -> tuple[int, int]:
    """Returns a number of equal steps over the columns, and their width; the rest is a step of its own."""
    steps = rows * columns / max(CHUNK * columns, _LOGITS)
    if steps <= 1:
        return 0, columns
    # Equal steps need no kernels for a last one.
    counts = range(math.ceil(0.7 * steps), math.ceil(1.5 * steps) + 1)
    for count in sorted(counts, key=lambda count: abs(math.log(count / steps))):
        if columns % (_COLUMNS * count) == 0:
            return count, columns // count
    width = _COLUMNS * math.ceil(columns / (_COLUMNS * math.ceil(steps)))
    return columns // width, width


def _shapes(x: jax.Array, w: jax.Array, *_: jax.Array, **__: Any) -> Arrays:
    return jnp.zeros(x.shape, x.dtype), jnp.zeros(w.shape, w.dtype)


gradients_kernel: Final = define_kernel("linear_cross_entropy_gradients", _gradients, None, _shapes)
"""(M, K), the weights, (M, 1) of `label_codes`, the statistics and cotangents (M, 1) of the losses: both gradients."""
