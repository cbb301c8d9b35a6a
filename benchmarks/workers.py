"""Programs of many Hopper schedules at once: lowered in worker processes, compiled in threads.

Lowering a kernel holds the interpreter lock for 0.1 to 0.3 s, so threads alone do not speed it up. A worker process
without a GPU lowers the program for CUDA and hands its StableHLO back; XLA compiles it outside of the lock.
"""

import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from pallas_kernels.contract import WgmmaContract
from pallas_kernels.ops.matmul.hopper.launch import matmul
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_TUNING_THREADS: Final = 6  # more would disturb each other's measurements

Program = Callable[[jax.Array, jax.Array], jax.Array]


class Job(NamedTuple):
    """A program (M, K) x (K, N) -> (M, N); with `schedule` None the one that the rule or the table chooses."""

    m: int
    k: int
    n: int
    dtype: str
    schedule: MatmulSchedule | None = None
    transpose_w: bool = False
    out_dtype: str | None = None

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        shape = (self.n, self.k) if self.transpose_w else (self.k, self.n)
        return jax.ShapeDtypeStruct((self.m, self.k), self.dtype), jax.ShapeDtypeStruct(shape, self.dtype)


class Workers:
    """Worker processes that lower and threads that compile; a context manager.

    Args:
        processes: Worker processes; by default all cores but two.
        threads: Threads that compile.
    """

    def __init__(self, processes: int | None = None, threads: int = 16) -> None:
        spawn, processes = multiprocessing.get_context("spawn"), processes or max(2, (os.cpu_count() or 4) - 2)
        self._processes = ProcessPoolExecutor(processes, mp_context=spawn, initializer=without_gpu)
        self._threads, self._tuning = ThreadPoolExecutor(threads), ThreadPoolExecutor(_TUNING_THREADS)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *raised: object) -> None:
        self._processes.shutdown(cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)
        self._tuning.shutdown(cancel_futures=True)

    def ours(self, job: Job) -> Future[Program]:
        """Starts to compile our program."""
        lowered = self._processes.submit(stablehlo, job)
        return self._threads.submit(lambda: compiled(job, lowered.result()))

    def xla(self, job: Job) -> Future[Program]:
        """Starts to compile XLA's default dot, which is tuned on the GPU meanwhile: see `device_time`."""
        return self._tuning.submit(lambda: jax.jit(lambda x, w: jnp.dot(x, w)).lower(*job.operands).compile())


def without_gpu() -> None:
    """Keeps a worker off the GPU, whose memory belongs to the process that measures."""
    jax.config.update("jax_platforms", "cpu")


def stablehlo(job: Job) -> bytes:
    """Returns the program that a Hopper GPU gets, serialised."""

    def multiply(x: Any, w: Any) -> Any:
        return matmul(
            x,
            w,
            contract=WgmmaContract(),
            schedule=job.schedule,
            transpose_w=job.transpose_w,
            out_dtype=job.out_dtype,
        )

    unchecked = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return export.export(jax.jit(multiply), platforms=("cuda",), disabled_checks=unchecked)(
        *job.operands
    ).mlir_module_serialized


def compiled(job: Job, program: bytes) -> Program:
    """Compiles a program of `stablehlo`; a trivial program of the same signature lends its wrapper."""
    out_dtype = job.out_dtype or job.dtype

    def wrapper(x: Any, w: Any) -> Any:
        return jnp.zeros((job.m, job.n), out_dtype) + x[0, 0].astype(out_dtype) + w[0, 0].astype(out_dtype)

    shell = export.export(jax.jit(wrapper), platforms=("cuda",))(*job.operands)
    whole = dataclasses.replace(shell, mlir_module_serialized=program)
    return jax.jit(whole.call).lower(*job.operands).compile()
