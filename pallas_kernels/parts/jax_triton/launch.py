"""Launches Triton kernels, compiled for the target of the program, with or without a GPU in this process."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.parts.jax_triton.library import call, limited_shared_memory, pinned_settings
from pallas_kernels.parts.jax_triton.typed_calls import make_typed
from pallas_kernels.parts.xla.manual_axes import result_type
from pallas_kernels.target import Target


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: everything that its machine code depends on, and the grid.

    Attributes:
        kernel: The function under `triton.jit`.
        arguments: Dtype names of the arrays, and integers for sizes, in the order of the kernel's parameters.
        results: Shapes and dtypes of the results, whose pointers are the next parameters.
        constants: Its arguments of the type `tl.constexpr`, sorted by name.
        grid: Numbers of programs.
        warps: Warps of a program.
        stages: Stages of the loops that Triton pipelines.
        fuses: Whether the compiler may fuse a product and a sum.
        target: The GPU.
        aliases: Pairs of the index of an array and the index of the result that updates it in place.
    """

    kernel: Any
    arguments: tuple[str | int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    warps: int
    stages: int
    fuses: bool
    target: Target
    aliases: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.fn.__name__)


class _Recorder(threading.local):
    launches: list[Launch] | None = None


_recorder: Final = _Recorder()


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Records the launches that are traced inside, in this thread, for tests that compile them."""
    outer, _recorder.launches = _recorder.launches, []
    try:
        yield _recorder.launches
    finally:
        _recorder.launches = outer


def launch(
    kernel: Any,
    *arguments: jax.Array | int,
    target: Target,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    fuses: bool,
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Launches a kernel on whole arrays.

    The kernel's parameters are the arguments in this order, the results, and the constants by name. Pointers are
    aligned to 16 bytes, arrays are dense and row-major. A size passed as an argument is not part of the machine code,
    which calls with different sizes share; except for 1, which is a constant.

    Args:
        kernel: A function under `triton.jit`.
        *arguments: Arrays and integers.
        target: The GPU that the program is lowered for.
        out: Shapes and dtypes of the results; the kernel writes every element, but for results that update an array.
        grid: Numbers of programs, up to three.
        warps: Warps of a program.
        stages: Stages of the loops that Triton pipelines.
        fuses: Whether the compiler may fuse a product and a sum into one instruction. Triton's default is different in
            every version and changes with the environment.
        constants: Values of the parameters of the type `tl.constexpr`.
        aliases: Maps the index of an array, among the arrays, to the index of the result that updates it in place. The
            kernel writes through the parameter of the result; that of the array may point anywhere.

    Returns:
        The results.

    Raises:
        UnsupportedError: When lowered, if jax-triton has another interface, Triton is set to interpret kernels, or the
            kernel needs more shared memory than a thread block of the GPU can have.
    """
    arrays = [a for a in arguments if not isinstance(a, int)]
    x, y, z = (*grid, 1, 1)[:3]
    described = Launch(
        kernel,
        tuple(a if isinstance(a, int) else a.dtype.name for a in arguments),
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in out),
        tuple(sorted(constants.items())),
        grid=(x, y, z),
        warps=warps,
        stages=stages,
        fuses=fuses,
        target=target,
        aliases=tuple(sorted((aliases or {}).items())),
    )
    if _recorder.launches is not None:
        _recorder.launches.append(described)
    return tuple(launch_p.bind(*arrays, described=described))


launch_p: Final = Primitive("bijax_triton_launch")
"""A primitive of this library around that of jax-triton: JAX 0.12.0 cannot simplify programs with the latter under
`jax.jit`, and the settings of the compiler have to hold when the kernel is lowered, not when it is traced."""

launch_p.multiple_results = True


def _call(*arrays: jax.Array, described: Launch) -> tuple[jax.Array, ...]:
    remaining = iter(arrays)
    return call(
        described.kernel,
        [a if isinstance(a, int) else next(remaining) for a in described.arguments],
        described.results,
        name=described.name,
        grid=described.grid,
        constants=dict(described.constants),
        warps=described.warps,
        stages=described.stages,
        fuses=described.fuses,
        compute_capability=described.target.generation,
        aliases=dict(described.aliases),
    )


_lower: Final = mlir.lower_fun(_call)


def _rule(ctx: Any, *operands: Any, described: Launch) -> Any:
    with pinned_settings(), limited_shared_memory(described.name, described.target):
        results = _lower(ctx, *operands, described=described)
    make_typed(results)
    return results


@functools.cache
def _compiled(described: Launch) -> Any:
    return jax.jit(functools.partial(launch_p.bind, described=described))


launch_p.def_impl(lambda *arrays, described: _compiled(described)(*arrays))
launch_p.def_abstract_eval(lambda *avals, described: [result_type(r.shape, r.dtype, avals) for r in described.results])
mlir.register_lowering(launch_p, _rule, platform="cuda")
