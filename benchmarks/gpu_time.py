"""Device times on a GPU, and what its memory can do."""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

_COPIED_ELEMENTS = 1 << 28  # 1 GiB of float32: many times the L2 cache


def device_time_us(call: Callable[[int], Any], calls: int) -> float:
    """Returns the median over calls of the time that all kernels of a call take on the device, in µs.

    Args:
        call: Runs the program for the i-th time and returns its results; it may walk through copies of the arguments.
        calls: How often to run it, after one run that is not measured.

    Raises:
        RuntimeError: If the calls did not run the same number of kernels each, or ran none.
    """
    jax.block_until_ready(call(0))
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # `profiler.measure` repeats a call on the same arrays only
    cupti._cupti_init()
    try:
        for i in range(calls):
            out = call(i)
        jax.block_until_ready(out)
    finally:
        kernels = cupti._cupti_get_timings(False)
    if not kernels or len(kernels) % calls:
        raise RuntimeError(f"expected the same number of kernels in each of {calls} calls, got {len(kernels)} kernels.")
    each = len(kernels) // calls
    return statistics.median(sum(ms for _, ms in kernels[i * each : (i + 1) * each]) for i in range(calls)) * 1e3


def copy_bytes_per_us() -> float:
    """Returns the bytes that a plain element-wise kernel reads and writes in a µs."""
    x = jnp.arange(_COPIED_ELEMENTS, dtype=jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / device_time_us(lambda _: copy(x), 10)
