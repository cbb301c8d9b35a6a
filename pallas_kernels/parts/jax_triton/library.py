"""The package jax-triton: how its versions are called, and the compiler settings that a kernel is compiled under."""

import contextlib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target

_ITS_CACHE: Final = "TRITON_CACHE_DIR"  # importing jax-triton changes this environment variable
_PINNED: Final[Mapping[str, Mapping[str, Any]]] = {
    "language": {"fp32_default": None, "default_fp_fusion": True, "force_disable_fp_fusion": False},
    "runtime": {"override_arch": None},
    "compilation": {"instrumentation_mode": ""},
    "nvidia": {"libdevice_path": None, "mock_ptx_version": None},
}
"""Settings of Triton that change machine code and can come from the environment, with the values used here."""

_lock: Final = threading.RLock()


def call(
    kernel: Any,
    arguments: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, int, int],
    constants: Mapping[str, Any],
    warps: int,
    stages: int,
    fuses: bool,
    compute_capability: int,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Calls a Triton kernel by `jax_triton.triton_call` of version 0.3 or 0.4.

    Args:
        kernel: A function under `triton.jit`.
        arguments: Arrays, and integers that are known only at run time.
        results: Shapes and dtypes of the results.
        name: Name of the kernel in profiles.
        grid: Numbers of programs.
        constants: Its arguments of the type `tl.constexpr`.
        warps: Warps of a program.
        stages: Stages of the loops that Triton pipelines.
        fuses: Whether the compiler may fuse a product and a sum.
        compute_capability: Times ten.
        aliases: Maps the index of an array, among the arrays, to the index of the result that updates it in place. The
            kernel writes through the parameter of the result.

    Raises:
        UnsupportedError: If jax-triton has another interface, or Triton is set to interpret kernels.
    """
    _check_compiled(kernel, name)
    triton_call = _library()
    parameters = inspect.signature(triton_call).parameters
    common: dict[str, Any] = {
        "kernel": kernel,
        "grid": grid,
        "name": name,
        "num_warps": warps,
        "num_stages": stages,
        "num_ctas": 1,
        "compute_capability": compute_capability,
        **constants,
    }
    if "out_type" in parameters and "backend_options" in parameters:  # 0.4
        options = {"enable_fp_fusion": fuses}
        if aliases:
            arguments, updated = _with_updated_last(kernel, arguments, aliases)
            common |= updated
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
            return tuple(triton_call(*arguments, out_type=tuple(results), backend_options=options, **common))
    if "out_shape" in parameters and "enable_fp_fusion" in parameters:  # 0.3
        if aliases:
            common["input_output_aliases"] = dict(aliases)
        return tuple(triton_call(*arguments, out_shape=tuple(results), enable_fp_fusion=fuses, **common))
    raise UnsupportedError(
        f"{name}: expected jax-triton 0.3 or 0.4, got a version whose triton_call takes ({', '.join(parameters)});"
        " install 'jax-triton>=0.3.1,<0.5'."
    )


def _with_updated_last(
    kernel: Any, arguments: Sequence[Any], aliases: Mapping[int, int]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments and options for version 0.4, where an array and the result that updates it have one parameter.

    That is the parameter of the result, as in version 0.3; the parameter of the array gets another array.
    """
    arguments, arrays = list(arguments), [i for i, a in enumerate(arguments) if not isinstance(a, int)]
    other = next(arguments[place] for i, place in enumerate(arrays) if i not in aliases)
    options: dict[str, Any] = {"input_output_aliases": {}}
    for i, result in sorted(aliases.items(), key=lambda pair: pair[1]):
        options["input_output_aliases"][len(arguments) + len(options) - 1] = result
        options[kernel.arg_names[len(arguments) + result]] = arguments[arrays[i]]
    for i in aliases:
        arguments[arrays[i]] = other
    return arguments, options


@contextlib.contextmanager
def pinned_settings() -> Iterator[None]:
    """Compiles kernels with stated settings inside, whatever the environment says.

    Everything else that affects the machine code is an argument of `call`, or written in the kernel: the precision of
    the operands of a product, and how many products are added before the accumulator is rounded.
    """
    from triton import knobs

    with _lock, contextlib.ExitStack() as stack:
        stack.callback(setattr, knobs, "propagate_env", knobs.propagate_env)
        knobs.propagate_env = False  # setting a knob would set its environment variable
        for group, values in _PINNED.items():
            knob_group = getattr(knobs, group, None)
            if knob_group is None:
                continue
            before = dict(knob_group.__dict__)
            stack.callback(_restore, knob_group, before)
            for knob, value in values.items():
                if hasattr(knob_group, knob):
                    setattr(knob_group, knob, value)
        yield


@contextlib.contextmanager
def limited_shared_memory(name: str, target: Target) -> Iterator[None]:
    """Refuses to compile a kernel inside that needs more shared memory than a thread block of the GPU can have.

    Otherwise the first launch fails, in the middle of a program. jax-triton does not return how much Triton needs, so
    the compiler's step that follows is wrapped; around an earlier one jax-triton replaces the error by one of its own.

    Args:
        name: Name of the kernel.
        target: The GPU.

    Raises:
        UnsupportedError: When a kernel is compiled inside, in this thread, that does not fit.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    step, thread = CUDABackend.make_ptx, threading.get_ident()
    parameters = inspect.signature(step)

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        needed = parameters.bind(*args, **kwargs).arguments["metadata"]["shared"]
        if threading.get_ident() == thread and needed > target.shared_memory:
            raise UnsupportedError(
                f"{name}: expected a schedule that needs at most {target.shared_memory} bytes of shared memory on"
                f" {target}, got one that needs {needed}; choose a smaller tile or fewer stages."
            )
        return step(*args, **kwargs)

    with _lock:
        CUDABackend.make_ptx = checked
        try:
            yield
        finally:
            CUDABackend.make_ptx = step


def _restore(knob_group: Any, values: Mapping[str, Any]) -> None:
    knob_group.__dict__.clear()
    knob_group.__dict__.update(values)


def _check_compiled(kernel: Any, name: str) -> None:
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise UnsupportedError(
            f"{name}: expected a kernel that Triton compiles, got {type(kernel).__name__}; unset TRITON_INTERPRET in"
            " the environment before Triton is imported."
        )


@functools.cache
def _library() -> Callable[..., Any]:
    before = os.environ.get(_ITS_CACHE)
    try:
        from jax_triton import triton_call
    finally:
        if before is None:
            os.environ.pop(_ITS_CACHE, None)
        else:
            os.environ[_ITS_CACHE] = before
    return triton_call
