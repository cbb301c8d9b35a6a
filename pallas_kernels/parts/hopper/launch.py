"""The launch of a kernel on a Hopper GPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


def launch(
    name: str,
    kernel: Callable[..., None],
    out: Any,
    grid: Mapping[str, int],
    scratch: Sequence[Any] = (),
    *,
    cluster: Mapping[str, int] | None = None,
    warpgroups: Mapping[str, int] | None = None,
    by_lanes: bool = False,
    parameters: plgpu.CompilerParams | None = None,
    interpret: Any,
    changes: bool = False,
) -> Callable[..., Any]:
    """Returns a function that launches a kernel on its operands, which may be pytrees.

    Args:
        name: Name of the kernel in profiles.
        kernel: The body of a block. It takes the operands, then the results, then the scratch.
        out: Type of the result, or a list of them.
        grid: Blocks (or clusters) along each named axis. All but the last axis are limited to 65535.
        scratch: Types of shared memory and barriers, or trees of them.
        cluster: Blocks of a cluster along a named axis.
        warpgroups: Warpgroups of a block along a named axis; by default a single one, without a name.
        by_lanes: Whether every array of the kernel has its layout from its load, and every barrier is written out.
            The other semantics would infer layouts, ten times as long.
        parameters: How it is compiled, instead of what follows from `by_lanes`.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        changes: Whether operands are mutable references, whose arrays are changed in place.
    """
    mesh: dict[str, Any] = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if cluster is not None:
        mesh |= {"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)}
    if warpgroups is not None:
        ((axis, count),) = warpgroups.items()
        mesh |= {"num_threads": count, "thread_name": axis}
    if parameters is None:
        parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    if by_lanes:
        parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
    if changes:  # `plgpu.kernel` does not take mutable references
        return _on_references(name, kernel, out, scratch, mesh, parameters, interpret)
    return plgpu.kernel(
        kernel,
        out_type=out,
        kernel_name=name,
        scratch_types=scratch,
        compiler_params=parameters,
        interpret=interpret,
        **mesh,
    )


def _on_references(
    name: str, kernel: Callable[..., None], out: Any, scratch: Sequence[Any], mesh: dict[str, Any], parameters: Any,
    interpret: Any,
) -> Callable[..., Any]:  # fmt: skip
    def body(*refs: Any) -> None:
        pl.run_scoped(partial(kernel, *refs), *scratch, collective_axes=mesh.get("thread_name", ()))

    run: Callable[..., Any] = pl.kernel(
        body, out_type=out, mesh=plgpu.Mesh(**mesh), compiler_params=parameters, name=name, interpret=interpret
    )
    return run
