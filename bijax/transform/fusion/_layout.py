"""The memory layout of a row program's arrays, and the kernel call."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.architecture import target_for
from bijax.dispatch.kernels import run_kernel
from bijax.transform.fusion._kinds import Labels
from pallas_kernels.row_program.program import Order, RowProgram


@dataclass(frozen=True)
class Layout:
    """The memory layout of a region's arrays.

    Attributes:
        sizes: Lengths of the row dimensions, by label.
        rows: Labels in the order in which the kernel takes the rows.
        columns: For each array of columns, its labels, and its labels in memory order.
        masks: For each mask, its labels, and those along which it varies.
        numbers: For each array of numbers, its labels.
        results: For each result (the row program's results, then its totals), its labels, its shape and its dtype.
    """

    sizes: tuple[int, ...]
    rows: Labels
    columns: tuple[tuple[Labels, Labels], ...]
    masks: tuple[tuple[Labels, Labels], ...]
    numbers: tuple[Labels, ...]
    results: tuple[tuple[Labels, tuple[int, ...], str], ...]


def run_row_program(*given_arrays: jax.Array, program: RowProgram, layout: Layout) -> list[jax.Array]:
    """Computes a region: takes its columns, masks, vectors and numbers, returns its results and totals."""
    given = iter(given_arrays)
    rows = math.prod(layout.sizes)
    columns, masks, orders = [], [], []
    for labels, lies in layout.columns:
        x = next(given)
        columns.append(x.transpose(*(labels.index(i) for i in lies), len(labels)).reshape(rows, x.shape[-1]))
        orders.append(_order(layout.sizes, layout.rows, lies))
    for labels, differs in layout.masks:
        mask = next(given)
        for d, label in enumerate(labels):
            if label not in differs:
                mask = lax.slice_in_dim(mask, 0, 1, axis=d)
        own = tuple(label for label in labels if label in differs)
        masks.append(mask.reshape(-1, mask.shape[-1]).astype(jnp.bfloat16))
        orders.append(_order(layout.sizes, layout.rows, own))
    vectors = [next(given).reshape(-1) for _ in program.vectors]
    sizes = tuple(layout.sizes[i] for i in layout.rows)
    numbers = [
        next(given)
        .reshape([layout.sizes[i] for i in labels])
        .transpose([labels.index(i) for i in layout.rows])
        .reshape(rows, 1)
        .astype(jnp.float32)  # column indices are exact
        for labels in layout.numbers
    ]
    arrays = columns, masks, vectors, numbers
    found = run_kernel("row_program", target_for("cuda"), None, program, *arrays, rows=rows, orders=orders)
    results = []
    parts = (*program.parts, *(1 for _ in program.totals))
    for y, (labels, shape, dtype), count in zip(found, layout.results, parts, strict=True):
        if count > 1:
            results.append(y)
            continue
        order = [layout.rows.index(i) for i in labels]
        if y.shape[1] == 1:
            results.append(y.reshape(sizes).transpose(order).reshape(shape).astype(dtype))
        else:
            results.append(y.reshape(*sizes, y.shape[1]).transpose(*order, len(order)))
    return results


def _order(sizes: Sequence[int], rows: Labels, lies: Labels) -> Order | None:
    """Returns which row of an array with some of the row dimensions belongs to each row."""
    if rows == lies:
        return None
    terms = []
    for at, label in enumerate(rows):
        if label in lies:
            divisor = math.prod(sizes[i] for i in rows[at + 1 :])
            stride = math.prod(sizes[i] for i in lies[lies.index(label) + 1 :])
            terms.append((divisor, sizes[label], stride))
    return Order(tuple(terms))
