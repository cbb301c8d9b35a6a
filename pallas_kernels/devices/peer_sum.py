"""A sum over the GPUs of one process as one kernel, which reads and stores in the memory of the other GPUs.

Each device owns a part of the array. A block reads the terms of its piece of the part from all devices, adds them as a
tree, rounds, and stores the result on all devices. Only float32 terms and rounded results travel, once each. Loads and
stores are ordinary ones: NVLink multicast is never used.

XLA makes all devices wait for each other before the kernel starts, so the terms are there and the results are not in
use. A block ends when the blocks of the same index of the other devices have read its terms and stored their results
here. It waits for these alone, and blocks start in ascending order: there is always one that goes on.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import TreeContract, add_as_tree, honour
from pallas_kernels.devices.blocks import COLUMNS
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.wide import load_wide, store_wide

_VECTOR: Final = 4
"""Elements that a thread loads at once."""


def peer_sum(
    x: jax.Array, *, axis: Any, devices: int, out_dtype: str, whole: bool, contract: TreeContract
) -> jax.Array:
    """Adds parts over devices, inside `jax.shard_map` over a mesh whose only axis is that of the sum.

    Args:
        x: (devices, size) float32, this device's terms of each device's part.
        axis: Name of the mesh axis.
        devices: Number of devices, a power of two.
        out_dtype: Dtype of the result.
        whole: Whether each device gets all parts, or its own.
        contract: The order of the sum.

    Returns:
        (devices, size) all parts, or (size,) this device's part, rounded once.

    Guarantee: each element is the sum over the devices as a fixed binary tree.
    """
    honour("peer_sum", contract, TreeContract())
    size = x.shape[1]
    columns = next(c for c in COLUMNS if size % c == 0)
    blocks = size // columns
    (total,) = launch(
        "peer_sum",
        partial(_block, axis=axis, devices=devices, columns=columns, whole=whole),
        [jax.ShapeDtypeStruct((devices if whole else 1, blocks, columns), out_dtype)],
        {"block": blocks},
        [plgpu.SemaphoreType.REGULAR],
        interpret=False,
    )(x.reshape(devices, blocks, columns))
    result: jax.Array = total.reshape((devices, size) if whole else (size,))
    return result


def _block(terms: Any, out: Any, done: Any, *, axis: Any, devices: int, columns: int, whole: bool) -> None:
    block, me = lax.axis_index("block"), lax.axis_index(axis)
    options: dict[str, Any] = {"columns": columns, "vector": _VECTOR}
    others = [lax.rem(me + step, jnp.int32(devices)) for step in range(1, devices)]
    sources = [plgpu.remote_ref(terms.at[me, block], jnp.int32(device)) for device in range(devices)]
    loaded = [load_wide(source, dtype=terms.dtype, **options) for source in sources]
    total = add_as_tree(lambda device: loaded[device], devices).astype(out.dtype)
    if whole:
        for other in others:
            store_wide(plgpu.remote_ref(out.at[me, block], other), total, **options)
    for other in others:  # after all stores: the first signal waits for them, and the others find nothing to wait for
        pl.semaphore_signal(done, device_id=other)
    store_wide(out.at[me if whole else 0, block], total, **options)
    count: Any = devices - 1
    pl.semaphore_wait(done, count)
