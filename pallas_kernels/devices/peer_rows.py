"""An all-to-all of rows between the GPUs of one process as one kernel, which moves used rows alone.

Each device reads the rows that it needs from where they are in the memory of the others, so they are not copied before
they travel. XLA makes all devices wait for each other before the kernel starts, so the rows are there; a block ends
when another device has read as much of this one's rows.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices.blocks import VECTOR
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.wide import load_wide, store_wide

_ROWS: Final = (16, 8, 4, 2, 1)
"""Rows of a block: the most that divide those of a sender. Other blocks of a multiprocessor hide a row's latency."""


def peer_rows(rows: jax.Array, index: jax.Array, *, axis: Any, devices: int) -> jax.Array:
    """Reads rows of other devices, inside `jax.shard_map` over a mesh whose only axis is that of the exchange.

    Args:
        rows: (R, C) of 16 bits, this device's rows, which others read.
        index: (devices, places) int32, for each place which row of that device it gets; -1 for none.
        axis: Name of the mesh axis.
        devices: Number of devices.

    Returns:
        (devices, places, C), the rows from each device; places without a row are undefined.

    Guarantee: rows are copied.
    """
    _, places = index.shape
    of_block = next(n for n in _ROWS if places % n == 0)
    moved: jax.Array = launch(
        "peer_rows",
        partial(_block, axis=axis, devices=devices, of_block=of_block),
        jax.ShapeDtypeStruct((devices, places, rows.shape[1]), rows.dtype),
        {"block": devices * (places // of_block)},
        [plgpu.SemaphoreType.REGULAR],
        interpret=False,
    )(rows, index.astype(jnp.int32))
    return moved


def _block(rows: Any, index: Any, out: Any, read: Any, *, axis: Any, devices: int, of_block: int) -> None:
    # Blocks that read from different devices take turns, and each link is used in both directions at once.
    number, me, several = lax.axis_index("block"), lax.axis_index(axis), jnp.int32(devices)
    sender, block = lax.rem(me + 1 + lax.rem(number, several), several), lax.div(number, several)
    options: dict[str, Any] = {"columns": rows.shape[1], "vector": VECTOR}
    for offset in range(of_block):
        place = block * of_block + offset
        row = index[sender, place]

        @pl.when(row >= 0)
        def _(place: Any = place, row: Any = row) -> None:
            loaded = load_wide(plgpu.remote_ref(rows.at[row], sender), dtype=rows.dtype, **options)
            store_wide(out.at[sender, place], loaded, **options)

    # One device reads this one's rows in the block of the same index.
    pl.semaphore_signal(read, device_id=sender)
    pl.semaphore_wait(read)
