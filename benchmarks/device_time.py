"""Device time of whole programs on a GPU."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler


def device_time_us(program: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], calls: int = 24) -> float:
    """Returns the median over calls of the time of all kernels of a call, in µs (CUPTI).

    Args:
        program: A compiled program.
        arguments: Sets of arguments; calls walk through them, so that nothing stays in the L2 cache.
        calls: Number of calls.
    """
    jax.block_until_ready(program(*arguments[0]))
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # `profiler.measure` repeats a call on the same arrays only
    cupti._cupti_init()
    try:
        for i in range(calls):
            out = program(*arguments[i % len(arguments)])
        jax.block_until_ready(out)
    finally:
        kernels = cupti._cupti_get_timings(False)
    if not kernels or len(kernels) % calls:
        raise RuntimeError(f"expected the same number of kernels in each of {calls} calls, got {len(kernels)} kernels.")
    each = len(kernels) // calls
    return statistics.median(sum(ms for _, ms in kernels[i * each : (i + 1) * each]) for i in range(calls)) * 1e3
