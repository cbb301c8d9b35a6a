"""Sums over the GPUs of one process by one kernel, as a primitive that XLA's collectives serve elsewhere.

Whether GPUs reach each other's memory depends on the mesh's devices, which are known once a program is lowered.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh

from bijax.core._jax_private import without_varying_types
from bijax.core.architecture import target_for
from bijax.core.contracts import run
from bijax.core.primitive import KERNELS, Arrays
from bijax.core.tag import kernel_code
from pallas_kernels.contract import TreeContract
from pallas_kernels.devices.peer_sum import peer_sum, served
from pallas_kernels.parts.xla.manual_axes import varying_axes
from pallas_kernels.runtime.own_settings import of_width, without_mesh

Otherwise = Callable[[jax.Array], jax.Array]

_PRIMITIVE: Final = Primitive("bijax_peer_sum")
_WITHOUT_NVLINK: Final = ("PCIe", "NVL")
"""In the names of Hopper GPUs that a host need not connect with each other."""


def may_serve(x: jax.Array, axes: Sequence[Any], devices: int) -> bool:
    """Returns whether the kernel adds such arrays if the mesh's GPUs reach each other: a mesh axis, float32, blocks."""
    return (
        x.dtype == np.float32
        and len(axes) == 1
        and axes[0] in jax.sharding.get_abstract_mesh().manual_axes
        and served(x.size, devices)
    )


def sum_over_peers(
    parts: jax.Array, *, axes: tuple[Any, ...], devices: int, out_dtype: str, whole: bool, to: str, otherwise: Otherwise
) -> jax.Array:
    """Adds parts over the devices, in a branch of a program for CUDA.

    Args:
        parts: (devices, size) float32, which `may_serve` accepts.
        axes: The mesh axis.
        devices: Number of devices.
        out_dtype: Dtype of the result.
        whole: Whether each device gets all parts.
        to: As in `jax.lax.all_gather`, for a whole result.
        otherwise: What adds them where the kernel cannot; hashable. Its result varies over the axis.
    """
    result: jax.Array = _PRIMITIVE.bind(
        parts, axes=axes, devices=devices, out_dtype=out_dtype, whole=whole, to=to, otherwise=otherwise
    )
    return result


def _abstract(parts: Any, *, axes: tuple[Any, ...], out_dtype: str, whole: bool, to: str, **_: Any) -> Any:
    shape = parts.shape if whole else parts.shape[1:]
    varying = varying_axes(parts)
    if not varying:
        return jax.core.ShapedArray(shape, np.dtype(out_dtype))
    kept = varying - frozenset(axes) if whole and to == "invarying" else varying
    nowhere = jax.sharding.NamedSharding(parts.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    manual = type(parts.manual_axis_type)(varying=kept)
    return jax.core.ShapedArray(shape, np.dtype(out_dtype), sharding=nowhere, manual_axis_type=manual)


def _contracts(parts: jax.Array, *, out_dtype: str, whole: bool, **_: Any) -> Arrays:
    """Records the contract, which is that of the tree on one device."""

    def like(parts: jax.Array, **_: Any) -> jax.Array:
        return jnp.zeros(parts.shape if whole else parts.shape[1:], out_dtype)

    return (run(peer_sum, parts, like=like, contract=TreeContract()),)


def _batch(arrays: Any, dimensions: Any, **parameters: Any) -> Any:
    """Adds the entries of a mapped axis one after another: they have parts of their own."""
    (parts,), (dimension,) = arrays, dimensions
    results = [_PRIMITIVE.bind(x, **parameters) for x in jnp.moveaxis(parts, dimension, 0)]
    return jnp.stack(results), 0


def _rule(
    ctx: Any, parts: Any, *, axes: tuple[Any, ...], devices: int, out_dtype: str, whole: bool, to: str,
    otherwise: Otherwise,
) -> Any:  # fmt: skip
    def by_kernel(x: jax.Array) -> jax.Array:
        return peer_sum(x, axis=axes[0], devices=devices, out_dtype=out_dtype, whole=whole, contract=TreeContract())

    add = by_kernel if _reach_each_other(ctx.module_context, axes) else otherwise
    (aval,) = ctx.avals_in
    plain = jax.core.ShapedArray(aval.shape, aval.dtype)
    with kernel_code(), without_mesh(), without_varying_types(), of_width(ctx.avals_in):
        return mlir.lower_fun(add, multiple_results=False)(ctx.replace(avals_in=[plain]), parts)


def _reach_each_other(module: Any, axes: Sequence[Any]) -> bool:
    """Returns whether the devices of the axis are all of a mesh of one process, and Hopper GPUs with NVLink."""
    mesh = getattr(module.axis_context, "mesh", None)
    if not isinstance(mesh, Mesh) or mesh.axis_names != tuple(axes) or jax.process_count() > 1:
        return False
    target = target_for("cuda")
    return (
        np.array_equal(mesh.device_ids.ravel(), np.arange(mesh.size))
        and "wgmma" in target.features
        and not target.backend
        and not any(word in mesh.devices.flat[0].device_kind for word in _WITHOUT_NVLINK)
    )


_PRIMITIVE.def_abstract_eval(_abstract)
batching.primitive_batchers[_PRIMITIVE] = _batch
KERNELS[_PRIMITIVE.name] = {"cuda": _contracts}
mlir.register_lowering(_PRIMITIVE, _rule, platform="cuda")
