"""Kernels that the GPUs of one process run together, as a primitive that XLA's collectives serve elsewhere.

Whether GPUs reach each other's memory depends on the devices of the mesh, which are known once a program is lowered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh

from bijax.core._jax_private import without_varying_types
from bijax.core.architecture import target_for
from bijax.core.contracts import is_recording, run
from bijax.core.primitive import KERNELS, Arrays
from bijax.core.tag import kernel_code
from pallas_kernels.contract import TreeContract
from pallas_kernels.devices.blocks import served, served_rows
from pallas_kernels.devices.peer_access import reach_each_other
from pallas_kernels.parts.xla.manual_axes import vary_alike, varying_axes
from pallas_kernels.runtime.own_settings import of_width, without_mesh

_PRIMITIVE: Final = Primitive("bijax_peers")


class PeerKernel(Protocol):
    """What the GPUs compute together; hashable."""

    @property
    def axis(self) -> Any:
        """Name of the mesh axis."""
        ...

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Runs the kernel."""
        ...

    def like(self, *arrays: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of the result."""
        ...

    def otherwise(self, *arrays: jax.Array) -> jax.Array:
        """Returns the same by XLA's collectives."""
        ...


@dataclass(frozen=True)
class PeerSum:
    """The sum of parts (devices, size) in float32: all parts, or this device's.

    Attributes:
        axis: Name of the mesh axis.
        devices: Number of devices.
        dtype: Dtype of the result.
        whole: Whether each device gets all parts.
        shape: What `written` reshapes the parts to.
        written: The same by XLA's collectives: a function of the parts, the axis, the dtype and the shape.
    """

    axis: Any
    devices: int
    dtype: str
    whole: bool
    shape: tuple[int, ...]
    written: Callable[..., jax.Array]

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Runs the kernel."""
        from pallas_kernels.devices.peer_sum import peer_sum  # imports Mosaic, which programs for others do not need

        options: dict[str, Any] = {"axis": self.axis, "devices": self.devices, "out_dtype": self.dtype}
        contract = TreeContract()
        return run(peer_sum, *arrays, like=self._zeros, whole=self.whole, contract=contract, **options)

    def like(self, *arrays: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of the result."""
        (parts,) = arrays
        return jax.ShapeDtypeStruct(parts.shape if self.whole else parts.shape[1:], self.dtype)

    def otherwise(self, *arrays: jax.Array) -> jax.Array:
        """Returns the same by XLA's collectives."""
        (parts,) = arrays
        return self.written(parts, self.axis, self.dtype, self.shape)

    def _zeros(self, parts: jax.Array, **_: Any) -> jax.Array:
        return _zeros(self.like(parts))


@dataclass(frozen=True)
class PeerRows:
    """The rows (R, C) that other devices have for this one's places, R of them.

    Its arrays are the rows, for each place of each device which row of this one it gets, -1 for none, and the inverse.

    Attributes:
        axis: Name of the mesh axis.
        devices: Number of devices.
        written: The same by XLA's collectives: a function of the arrays and the axis.
    """

    axis: Any
    devices: int
    written: Callable[..., jax.Array]

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Runs the kernel."""
        rows, sent, _ = arrays
        if is_recording():  # rows are copied: no contract
            return _zeros(self.like(*arrays))
        from pallas_kernels.devices.peer_rows import peer_rows

        index = lax.all_to_all(sent, self.axis, split_axis=0, concat_axis=0, tiled=True).reshape(self.devices, -1)
        return peer_rows(rows, index, axis=self.axis, devices=self.devices).reshape(rows.shape)

    def like(self, *arrays: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of the result."""
        return jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)

    def otherwise(self, *arrays: jax.Array) -> jax.Array:
        """Returns the same by XLA's collectives."""
        return self.written(*arrays, self.axis)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def may_sum(x: jax.Array, axes: Sequence[Any], devices: int) -> bool:
    """Returns whether the kernel of `PeerSum` adds such float32 arrays, if the GPUs of the mesh reach each other."""
    return _of_mesh(axes) and served(x.size, devices)


def may_move(rows: jax.Array, axes: Sequence[Any]) -> bool:
    """Returns whether the kernel of `PeerRows` moves such rows, if the GPUs of the mesh reach each other."""
    return _of_mesh(axes) and served_rows(rows.shape, rows.dtype)


def on_peers(kernel: PeerKernel, *arrays: jax.Array, to: str = "varying") -> jax.Array:
    """Runs a kernel on the GPUs of its mesh axis, in a branch of a program for CUDA.

    Args:
        kernel: The kernel.
        *arrays: Its arrays.
        to: As in `jax.lax.all_gather`: "invarying" if all devices have the same result.
    """
    result: jax.Array = _PRIMITIVE.bind(*vary_alike(arrays), kernel=kernel, to=to)
    return result


def _of_mesh(axes: Sequence[Any]) -> bool:
    return len(axes) == 1 and axes[0] in jax.sharding.get_abstract_mesh().manual_axes


def _abstract(*avals: Any, kernel: PeerKernel, to: str) -> Any:
    like, first = kernel.like(*avals), avals[0]
    varying = varying_axes(first)
    if not varying:
        return jax.core.ShapedArray(like.shape, like.dtype)
    kept = varying - {kernel.axis} if to == "invarying" else varying
    nowhere = jax.sharding.NamedSharding(first.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(like.shape)))
    manual = type(first.manual_axis_type)(varying=kept)
    return jax.core.ShapedArray(like.shape, like.dtype, sharding=nowhere, manual_axis_type=manual)


def _batch(arrays: Any, dimensions: Any, **parameters: Any) -> Any:
    """Runs the kernel for the entries of a mapped axis one after another."""
    size = next(x.shape[d] for x, d in zip(arrays, dimensions, strict=True) if d is not None)

    def entry(i: int) -> jax.Array:
        given = [x if d is None else jnp.take(x, i, axis=d) for x, d in zip(arrays, dimensions, strict=True)]
        result: jax.Array = _PRIMITIVE.bind(*vary_alike(given), **parameters)
        return result

    return jnp.stack([entry(i) for i in range(size)]), 0


def _rule(ctx: Any, *operands: Any, kernel: PeerKernel, to: str) -> Any:
    function = kernel.__call__ if _may_run(ctx.module_context, kernel.axis) else kernel.otherwise
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    with kernel_code(), without_mesh(), without_varying_types(), of_width(ctx.avals_in):
        return mlir.lower_fun(function, multiple_results=False)(ctx.replace(avals_in=plain), *operands)


def _may_run(module: Any, axis: Any) -> bool:
    """Returns whether the axis has all devices of a mesh of one process, and these are Hopper GPUs with NVLink."""
    mesh = getattr(module.axis_context, "mesh", None)
    if not isinstance(mesh, Mesh) or mesh.axis_names != (axis,) or jax.process_count() > 1:
        return False
    target = target_for("cuda")
    return (
        np.array_equal(mesh.device_ids.ravel(), np.arange(mesh.size))
        and "wgmma" in target.features
        and not target.backend
        and reach_each_other(mesh.devices.ravel().tolist())
    )


def _recorded(*arrays: jax.Array, kernel: PeerKernel, to: str) -> Arrays:
    del to
    return (kernel(*arrays),)


_PRIMITIVE.def_abstract_eval(_abstract)
batching.primitive_batchers[_PRIMITIVE] = _batch
mlir.register_lowering(_PRIMITIVE, _rule, platform="cuda")
KERNELS[_PRIMITIVE.name] = {"cuda": _recorded}
