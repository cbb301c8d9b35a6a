"""An all-to-all of rows between the GPUs of one process as one kernel, which moves used rows alone.

Each device reads the rows that it needs from the memory of the others. XLA makes all devices wait for each other before
the kernel starts, so the rows are there; a block ends when another device has read as much of this one's rows.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.launch import launch

_TILE: Final = 8192
"""Elements of 16 bits that a block has on their way at once."""
_TILES: Final = (4, 2, 1)
"""Tiles of a block: the most that divide the rows of a sender."""
_VECTOR: Final = 8


def served(shape: Sequence[int], dtype: Any) -> bool:
    """Returns whether the kernel moves such rows: 16 bits, whole tiles from each sender."""
    elements = math.prod(shape[1:])
    return len(shape) == 3 and jnp.dtype(dtype).itemsize == 2 and elements % _TILE == 0 and 0 < elements < 1 << 31


def peer_exchange(rows: jax.Array, used: jax.Array, *, axis: Any, devices: int) -> jax.Array:
    """Moves rows between devices, inside `jax.shard_map` over a mesh whose only axis is that of the exchange.

    Args:
        rows: (devices, rows, C) of 16 bits, the rows for each device.
        used: (devices,) int32, how many rows this device needs of each: the first ones.
        axis: Name of the mesh axis.
        devices: Number of devices.

    Returns:
        (devices, rows, C), the rows from each device; unused ones are undefined.

    Guarantee: rows are copied.
    """
    _, places, width = rows.shape
    count = places * width // _TILE
    tiles = next(t for t in _TILES if count % t == 0)
    moved = launch(
        "peer_exchange",
        partial(_block, axis=axis, devices=devices, tiles=tiles),
        jax.ShapeDtypeStruct((devices, count, _TILE), rows.dtype),
        {"step": devices, "block": count // tiles},
        [plgpu.SemaphoreType.REGULAR],
        interpret=False,
    )(rows.reshape(devices, count, _TILE), (used * width).astype(jnp.int32))
    result: jax.Array = moved.reshape(rows.shape)
    return result


def _block(rows: Any, used: Any, out: Any, read: Any, *, axis: Any, devices: int, tiles: int) -> None:
    step, block, me = lax.axis_index("step"), lax.axis_index("block"), lax.axis_index(axis)
    sender = lax.rem(me + 1 + step, jnp.int32(devices))  # each link in both directions at once
    layout = plgpu.Layout.WG_STRIDED((_TILE,), vec_size=_VECTOR)
    for index in range(tiles):
        tile = block * tiles + index

        @pl.when(tile * _TILE < used[sender])
        def _(tile: Any = tile) -> None:
            source = plgpu.remote_ref(rows.at[me, tile], sender)
            out[sender, tile] = plgpu.load(source, layout=layout, optimized=False)

    # One device reads this one's rows in the block of the same index.
    pl.semaphore_signal(read, device_id=sender)
    pl.semaphore_wait(read)
