"""A sum over the GPUs of one process as one kernel: terms and results are stored in the memory of the other GPUs.

Each device owns a part of the array. A block stores its terms of all parts with their owners, waits for the terms of
its own part, adds these as a tree, rounds, and stores the result with everybody. Only float32 terms and rounded results
travel, once each. The stores are ordinary ones: NVLink multicast is never used.

XLA makes all devices wait for each other before the kernel starts, so that results and landing areas are not in use.
A block waits for the block of the same index of other devices alone, and blocks start in ascending order: there is
always one that goes on.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import TreeContract, add_as_tree, honour
from pallas_kernels.parts.hopper.launch import launch

_LANES: Final = 128
_VECTOR: Final = 4
READS: Final = True
COLUMNS: Final = (2048, 1024, 512)
"""Elements that a block adds: the largest that divides a part. More in flight at once cost fewer waits."""


def served(elements: int, devices: int) -> bool:
    """Returns whether the kernel adds arrays of this many elements: each part must be a number of whole blocks."""
    return elements > 0 and elements % (devices * COLUMNS[-1]) == 0


def peer_sum(
    x: jax.Array,
    *,
    axis: Any,
    devices: int,
    out_dtype: str,
    whole: bool,
    contract: TreeContract,
    reads: bool = READS,
    columns: int | None = None,
) -> jax.Array:
    """Adds parts over devices, inside `jax.shard_map` over a mesh whose only axis is that of the sum.

    Args:
        x: (devices, size) float32, this device's terms of each device's part.
        axis: Name of the mesh axis, or a tuple with it.
        devices: Number of devices, a power of two.
        out_dtype: Dtype of the result.
        whole: Whether each device gets all parts, or its own.
        contract: The order of the sum.
        reads: Whether a device reads the terms of its part from the others; otherwise they store them with it.
        columns: Elements that a block adds.

    Returns:
        (devices, size) all parts, or (size,) this device's part, rounded once.

    Guarantee: each element is the sum over the devices as a fixed binary tree.
    """
    honour("peer_sum", contract, TreeContract())
    size = x.shape[1]
    columns = columns or next(c for c in COLUMNS if size % c == 0)
    blocks = size // columns
    out = jax.ShapeDtypeStruct((devices if whole else 1, blocks, columns), out_dtype)
    landing = jax.ShapeDtypeStruct((devices, blocks, columns), jnp.float32)
    total, *_ = launch(
        "peer_sum",
        partial(_reading if reads else _storing, axis=axis, devices=devices, columns=columns, whole=whole),
        [out] if reads else [out, landing],
        {"block": blocks},
        [plgpu.SemaphoreType.REGULAR] * (1 if reads or not whole else 2),
        interpret=False,
    )(x.reshape(devices, blocks, columns))
    shape = (devices, size) if whole else (size,)
    result: jax.Array = total.reshape(shape)
    return result


def _storing(
    terms: Any, out: Any, landing: Any, arrived: Any, *done: Any, axis: Any, devices: int, columns: int, whole: bool
) -> None:
    block, me, load, others = _places(axis, devices, columns)
    for other in others:
        plgpu.remote_ref(landing.at[me, block], other)[...] = load(terms.at[other, block])
    _tell(arrived, others)
    landing[me, block] = load(terms.at[me, block])
    _wait(arrived, devices)
    total = add_as_tree(lambda device: load(landing.at[device, block]), devices).astype(out.dtype)
    if not whole:
        out[0, block] = total
        return
    (last,) = done
    _give(total, out, last, block, me, others)


def _reading(terms: Any, out: Any, done: Any, *, axis: Any, devices: int, columns: int, whole: bool) -> None:
    block, me, load, others = _places(axis, devices, columns)
    loaded = [load(plgpu.remote_ref(terms.at[me, block], jnp.int32(device))) for device in range(devices)]
    total = add_as_tree(lambda device: loaded[device], devices).astype(out.dtype)
    if whole:
        _give(total, out, done, block, me, others)
        return
    _tell(done, others)  # it has read their terms
    out[0, block] = total
    _wait(done, devices)


def _places(axis: Any, devices: int, columns: int) -> tuple[Any, Any, Any, list[Any]]:
    """Returns the block, this device, what loads a block, and the other devices."""
    block, me = lax.axis_index("block"), lax.axis_index(axis)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=_VECTOR)
    others = [lax.rem(me + step, jnp.int32(devices)) for step in range(1, devices)]
    return block, me, partial(plgpu.load, layout=layout, optimized=False), others


def _give(total: Any, out: Any, done: Any, block: Any, me: Any, others: list[Any]) -> None:
    """Stores a part with everybody, and waits for the parts of the others."""
    for other in others:
        plgpu.remote_ref(out.at[me, block], other)[...] = total
    _tell(done, others)
    out[me, block] = total
    _wait(done, len(others) + 1)


def _tell(semaphore: Any, others: list[Any]) -> None:
    # After all stores: the first signal waits for them, the others find nothing left to wait for.
    for other in others:
        pl.semaphore_signal(semaphore, device_id=other)


def _wait(semaphore: Any, devices: int) -> None:
    count: Any = devices - 1
    pl.semaphore_wait(semaphore, count)
