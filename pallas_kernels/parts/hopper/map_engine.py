"""Element-wise kernels on rows, with a few scalars per row, on a Hopper GPU.

A block of one warpgroup takes some thousand columns of one row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, strided
from pallas_kernels.parts.hopper.edge import load_edge, store_edge
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.limbs import limbs
from pallas_kernels.parts.hopper.online_row import OnlineRow
from pallas_kernels.parts.hopper.profile_name import profile_name
from pallas_kernels.parts.hopper.row_launch import Parted
from pallas_kernels.parts.in_32_bits import in_32_bits

_PART: Final = 4096  # columns of a block
_VECTOR_BYTES: Final = 16

Numbers = tuple[jax.Array, ...]


@in_32_bits
def run_map(
    begin: Callable[[OnlineRow], Numbers],
    step: Callable[..., jax.Array],
    x: jax.Array,
    given: Sequence[jax.Array],
    *,
    change: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
    result: Parted | None = None,
    interpret: Any,
) -> jax.Array:
    """Maps every element of rows.

    Args:
        begin: Maps a row to its scalars.
        step: Maps the row, float32 columns of it and its scalars to columns of the result.
        x: (M, C).
        given: (M, 1) arrays, scalars of each row.
        change: Maps the row and its scalars to a column and a value that overrides the result there; no column if it is
            negative.
        result: How the result is stored: with several parts as the limbs of float32 numbers. By default in the dtype of
            `x`.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, C) in the dtype of `x`, or (parts * M, C) as `result` says.
    """
    m, c = x.shape
    stored = Parted(x.dtype) if result is None else result
    out = jax.ShapeDtypeStruct((m * stored.parts, c), stored.dtype)
    if 0 in (m, c):
        return jnp.zeros(out.shape, out.dtype)
    parts = -(-c // _PART)
    vector = _VECTOR_BYTES // x.dtype.itemsize
    if c % vector:
        vector = 1

    def kernel(source: Any, known: Sequence[Any], written: Any) -> None:
        index, part = lax.axis_index("row"), lax.axis_index("part")
        row = OnlineRow(index, source, known, [], False, interpret)
        numbers = begin(row)
        first = part * _PART

        def parts_of(value: jax.Array) -> list[tuple[Any, jax.Array]]:
            values = [value] if stored.parts == 1 else limbs(value, stored.parts, interpret)
            return [(stored.row(index, i), v.astype(stored.dtype)) for i, v in enumerate(values)]

        def body(columns: int) -> None:
            # Issue all loads first: the compiler does not move loads across stores.
            width, start, blocks = WARPGROUP * vector, 0, []
            while width >= WARPGROUP:
                while columns - start >= width:
                    at = pl.ds(first + start, width)
                    blocks.append((at, plgpu.load(source.at[index, at], layout=strided(width)).astype(jnp.float32)))
                    start += width
                width //= 2
            valid = columns - start
            edge = load_edge(source.at[index], first + start, valid, interpret) if valid else None
            for at, block in blocks:
                for place, value in parts_of(step(row, block, *numbers)):
                    written[place, at] = value
            if edge is not None:
                for place, value in parts_of(step(row, edge, *numbers)):
                    store_edge(written.at[place], first + start, valid, value, interpret)

        last = c - (parts - 1) * _PART
        if parts == 1 or last == _PART:
            body(last)
        else:
            pl.when(part < parts - 1)(functools.partial(body, _PART))
            pl.when(part == parts - 1)(functools.partial(body, last))
        if change is None:
            return
        column, value = change(row, *numbers)

        @pl.when((column >= first) & (column < first + _PART))
        def _() -> None:
            plgpu.commit_smem()  # every thread has written its columns
            for place, part in parts_of(value):
                written[place, column] = part

    run = launch(profile_name(step), kernel, out, {"part": parts, "row": m}, by_lanes=True, interpret=interpret)
    return run(x, given)
