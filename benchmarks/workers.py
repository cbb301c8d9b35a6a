"""Programs of many Hopper schedules at once: lowered in worker processes, compiled in threads.

Lowering a kernel holds the interpreter lock for 0.1 to 0.3 s, so threads alone do not speed it up. A worker process
without a GPU lowers the program for CUDA and returns its StableHLO; XLA compiles it without the lock.
"""

import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import export

import bijax
from pallas_kernels.contract import WgmmaContract
from pallas_kernels.matmul.hopper.launch import matmul
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule
from pallas_kernels.target import Target

_TUNING_THREADS: Final = 6  # more would disturb each other's measurements

Program = Callable[..., jax.Array]


class Work(Protocol):
    """A program that worker processes can build: an object that can be pickled."""

    @property
    def backend(self) -> str:
        """The backend whose kernels serve it, as `bijax.prefer_backend` takes it."""

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that it takes."""

    @property
    def result(self) -> Any:
        """The array that it returns, or a tree of arrays."""

    def function(self, *arrays: Any) -> Any:
        """Our form of it."""


class Job(NamedTuple):
    """A program (M, K) x (K, N) -> (M, N); with `schedule` None the one that the rule or the table chooses.

    `backend` is "hopper" or "jax_triton", which has no `schedule` here.
    """

    m: int
    k: int
    n: int
    dtype: str
    schedule: MatmulSchedule | None = None
    transpose_w: bool = False
    out_dtype: str | None = None
    backend: str = "hopper"

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        shape = (self.n, self.k) if self.transpose_w else (self.k, self.n)
        return jax.ShapeDtypeStruct((self.m, self.k), self.dtype), jax.ShapeDtypeStruct(shape, self.dtype)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), self.out_dtype or self.dtype)

    def function(self, x: Any, w: Any) -> Any:
        if self.backend == "jax_triton":
            from pallas_kernels.matmul.jax_triton.launch import matmul as triton_matmul  # needs Triton

            options: dict[str, Any] = {"transpose_w": self.transpose_w, "out_dtype": self.out_dtype or self.dtype}
            return triton_matmul(x, w, contract=WgmmaContract(), target=Target.parse("sm_90"), **options)
        return matmul(
            x,
            w,
            contract=WgmmaContract(),
            schedule=self.schedule,
            transpose_w=self.transpose_w,
            out_dtype=self.out_dtype,
        )


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

    def ours(self, work: Work) -> Future[Program]:
        """Starts to compile our program."""
        lowered = self._processes.submit(stablehlo, work)
        return self._threads.submit(lambda: compiled(work, lowered.result()))

    def xla(self, work: Work, function: Callable[..., Any] = jnp.dot) -> Future[Program]:
        """Starts to compile XLA's form, which is tuned on the GPU meanwhile: see `device_time`."""
        return self._tuning.submit(lambda: jax.jit(function).lower(*work.operands).compile())


def without_gpu() -> None:
    """Keeps a worker off the GPU, whose memory belongs to the process that measures."""
    jax.config.update("jax_platforms", "cpu")


def stablehlo(work: Work) -> bytes:
    """Returns the program that a Hopper GPU gets, serialised."""
    targets = "mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi", "__gpu$xla.gpu.ptx"
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in targets]
    with bijax.lowering_for("sm_90"), bijax.prefer_backend(work.backend):
        exported = export.export(jax.jit(work.function), platforms=("cuda",), disabled_checks=unchecked)(*work.operands)
    return exported.mlir_module_serialized


def compiled(work: Work, program: bytes) -> Program:
    """Compiles a program of `stablehlo`; a trivial program of the same signature lends its wrapper."""
    result = work.result

    def wrapper(*arrays: Any) -> Any:
        return jax.tree.map(
            lambda r: jnp.zeros(r.shape, r.dtype) + sum(a.ravel()[0].astype(r.dtype) for a in arrays), result
        )

    shell = export.export(jax.jit(wrapper), platforms=("cuda",))(*work.operands)
    whole = dataclasses.replace(shell, mlir_module_serialized=program)
    return jax.jit(whole.call).lower(*work.operands).compile()
