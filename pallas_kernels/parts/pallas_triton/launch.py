"""Launches Triton kernels, also in programs lowered on a machine without a GPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import AbstractDevice, get_abstract_mesh, use_abstract_mesh

_DEVICE: Final = AbstractDevice(device_kind="NVIDIA A100", num_cores=None, platform="gpu")
"""A placeholder device for tracing. The kernels use no 8-bit floats, so the program is the same for all GPUs; XLA
compiles it for the actual GPU."""


def launch(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    blocks: int,
    out: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs a kernel in `blocks` thread blocks.

    Args:
        kernel: Takes references to each whole array and each whole result, and reads `pl.program_id(0)`.
        *arrays: Input arrays.
        blocks: Number of blocks.
        out: Shapes and dtypes of the results.
        warps: Warps of a block.
        stages: Pipeline stages of loops.
        aliases: Maps the index of an array to the index of the result that updates it in place.
        interpret: Whether to run on a CPU, one block at a time.
    """
    call = pl.pallas_call(
        kernel,
        out_shape=tuple(_varying(shape, arrays) for shape in out),
        grid=(blocks,),
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        compiler_params=None if interpret else plt.CompilerParams(num_warps=warps, num_stages=stages),
    )
    mesh = get_abstract_mesh()
    if interpret or getattr(mesh.abstract_device, "platform", None) == "gpu":
        return tuple(call(*arrays))
    with use_abstract_mesh(mesh.update(abstract_device=_DEVICE)):
        return tuple(call(*arrays))


def _varying(shape: jax.ShapeDtypeStruct, arrays: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
    """Returns the shape of a result that varies over every `jax.shard_map` mesh axis over which an array varies."""
    kinds = [jax.typeof(array).manual_axis_type for array in arrays]
    varying = frozenset[str]().union(*(kind.varying for kind in kinds))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=type(kinds[0])(varying=varying))
