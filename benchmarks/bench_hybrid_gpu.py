"""Models of Qwen3-Next's layers on a GPU: bijax's own, and the same model in plain JAX.

    python -m benchmarks.bench_hybrid_gpu
    python -m benchmarks.bench_hybrid_gpu --cells decode:8x2048 --kernels 15
    python -m benchmarks.bench_hybrid_gpu --programs FOLDER --only-lower    # anywhere; then the same on the GPU without

Three layers of four have linear attention. Sizes are those of Qwen3-Next-80B-A3B, but for the experts (16 instead of
512, 10 of them for a token) and the number of layers. Steps are those of a server without its host: a token or a prompt
against keys, values and states, which are donated and returned, with the logits of the last token; and training, as in
`bench_model_gpu`. Sequences that decode stand at different rows of their chunk; one of 64 goes over an edge.

The plain model is `benchmarks.recurrent_ops`, with XLA's or cuDNN's attention, the faster one. Times are those of the
wall clock, as in `bench_model_gpu`; `device_us` is the time of all kernels, `queued_us` that of steps in a row. `ratio`
is the other's time over ours.

Triton's compiler holds Python's lock, so our programs are lowered in processes of their own, at the same time.
Compiling all programs takes about two minutes on 16 cores.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
from flax import nnx
from jax import export

import bijax
from benchmarks import hybrid_steps
from benchmarks.device_time import kernel_table
from benchmarks.harness import add_json, interleaved_us, queued_us, save
from benchmarks.model_steps import Cell
from benchmarks.recurrent_ops import RecurrentCudnnOps, RecurrentOps
from benchmarks.workers import without_gpu
from flax_layers import INVARIANT, Llama

CELLS: Final = (*(f"decode:{batch}x2048" for batch in (1, 8, 64)), "prefill:4x2048", "train:4x2048")
OPS: Final[dict[str, Any]] = {"own": INVARIANT, "xla": RecurrentOps(), "cudnn": RecurrentCudnnOps()}
CUSTOM_CALLS: Final = (
    "triton_kernel_call",
    "triton_kernel_call_ffi",
    "mosaic_gpu_v2",
    "mosaic_gpu",
    "__gpu$xla.gpu.ptx",
)
ROUNDS: Final = {"decode": 9}
SETTLE: Final = 0.1


class Work(NamedTuple):
    """A program of a model."""

    cell: Cell
    name: str
    layers: int

    @property
    def file(self) -> str:
        """Name of a file for the lowered program."""
        return f"{self.name}_{self.cell}_{self.layers}".replace(" ", "_")

    def model(self) -> Llama:
        """Returns the model, with weights."""
        return hybrid_steps.model(hybrid_steps.config(self.layers, self.cell.keys + 1), self.cell, OPS[self.name])

    def traceable(self) -> tuple[Callable[..., list[Any]], list[Any], int]:
        """Returns a step that takes and returns arrays, their types, and how many of them it uses up."""
        model: Llama = nnx.eval_shape(self.model)
        model._set_rotary()
        held = jax.eval_shape(lambda model: hybrid_steps.arrays(model, self.cell), model)
        step = hybrid_steps.step(model, self.cell)
        leaves, tree = jax.tree.flatten((held.changed, held.kept))

        def flat(*leaves: Any) -> list[Any]:
            changed, kept = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(step(*changed, *kept))

        return flat, leaves, len(jax.tree.leaves(held.changed))

    def lowered(self) -> bytes:
        """Returns the program for a Hopper GPU, with its kernels, whatever this machine has."""
        step, types, _ = self.traceable()
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
        with bijax.lowering_for("sm_90"):
            program = export.export(jax.jit(step), platforms=("cuda",), disabled_checks=checks)(*types)
        return bytes(program.serialize())

    def compiled(self, lowered: Future[bytes] | None) -> "Program":
        """Returns the compiled program; it is lowered here without `lowered`."""
        step, types, changed = self.traceable()
        if lowered is not None:
            step = export.deserialize(bytearray(lowered.result())).call
        program = jax.jit(step, donate_argnums=tuple(range(changed))).lower(*types).compile()
        memory: Any = program.memory_analysis()
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        return Program(program, round((total - memory.alias_size_in_bytes) / 2**20))


class Program(NamedTuple):
    """A compiled step, and its arguments, results and temporary memory."""

    run: Any
    peak_mib: int


class Held:
    """The arrays of a cell, which its programs share; those that a step returns replace those that it received."""

    def __init__(self, model: Llama, cell: Cell) -> None:
        found = hybrid_steps.arrays(model, cell)
        self._changed, self._kept = jax.tree.leaves(found.changed), jax.tree.leaves(found.kept)

    def call(self, program: Program) -> Any:
        """Runs a step, and keeps what it returns for the next one."""
        first, *changed = program.run(*self._changed, *self._kept)
        self._changed = changed
        return first


def measure(cell: Cell, layers: int, ready: dict[str, Future[Program]], kernels: int) -> dict[str, Any]:
    """Returns the line of a cell; prints the longest kernels of each program if asked to."""
    programs = {}
    for name, future in ready.items():
        try:
            programs[name] = future.result()
        except Exception as error:  # cuDNN does not have every attention
            if name != "cudnn":
                raise
            print(f"{cell}: no program with cuDNN's attention, {type(error).__name__}: {str(error)[:200]}", flush=True)
    held = Held(Work(cell, "own", layers).model(), cell)
    calls = {name: lambda program=program: held.call(program) for name, program in programs.items()}
    timed = interleaved_us(list(calls.values()), seconds=1, rounds=ROUNDS.get(cell.kind, 3), settle=SETTLE)
    times = dict(zip(calls, timed, strict=True))
    plain = min((name for name in calls if name != "own"), key=times.__getitem__)
    row = {"model": "own", "layers": layers, "case": str(cell), "ours_us": round(times["own"], 1), "against": plain}
    row |= {"xla_us": round(times[plain], 1), "ratio": round(times[plain] / times["own"], 3)}
    if cell.kind == "decode":
        queued = dict(zip(calls, queued_us(list(calls.values())), strict=True))
        other = min(us for name, us in queued.items() if name != "own")
        row |= {"queued_us": round(queued["own"], 1), "xla_queued_us": round(other, 1)}
        row |= {"queued_ratio": round(other / queued["own"], 3)}
    for name, key in (("own", "device_us"), (plain, "xla_device_us")):
        table = kernel_table(calls[name])
        row[key] = round(sum(us for *_, us in table), 1)
        print(f"{cell}, {name}: {row[key]} µs in {sum(n for _, n, _ in table):.0f} kernels", flush=True)
        for kernel, count, us in table[:kernels]:
            print(f"{us:10.1f} µs in {count:6} of {kernel[:100]}", flush=True)
    return row | {"peak_mib": programs["own"].peak_mib, "plain_peak_mib": programs[plain].peak_mib}


def lowered(works: Sequence[Work], folder: Path | None) -> list[Future[bytes]]:
    """Returns our lowered programs; with a folder they are kept there, and not lowered again."""
    files = [None if folder is None else folder / work.file for work in works]
    workers = min(len(works), os.cpu_count() or 1)
    with (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=without_gpu) as pool,
        ThreadPoolExecutor(len(works)) as threads,
    ):

        def get(work: Work, file: Path | None) -> bytes:
            if file is not None and file.exists():
                return file.read_bytes()
            found = pool.submit(Work.lowered, work).result()
            if file is not None:
                file.write_bytes(found)
            return found

        return [threads.submit(get, work, file) for work, file in zip(works, files, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Models of Qwen3-Next's layers on a GPU.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cells", default=",".join(CELLS), help="as in decode:8x2048,train:4x2048")
    parser.add_argument("--against", default="xla,cudnn", help="whose attention the plain model has")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each program, longest first")
    parser.add_argument("--programs", type=Path, help="a folder in which our lowered programs are kept")
    parser.add_argument("--only-lower", action="store_true", help="fill that folder, and stop")
    add_json(parser)
    arguments = parser.parse_args()
    cells, names = [Cell.parse(text) for text in arguments.cells.split(",")], ["own", *arguments.against.split(",")]
    if unknown := set(names) - set(OPS):
        parser.error(f"expected xla or cudnn, got {', '.join(sorted(unknown))}")
    if arguments.programs:
        arguments.programs.mkdir(parents=True, exist_ok=True)
    ours = lowered([Work(cell, "own", arguments.layers) for cell in cells], arguments.programs)
    if arguments.only_lower:
        print(f"{len(cells)} programs, {sum(len(program.result()) for program in ours)} bytes")
        return
    with ThreadPoolExecutor() as threads:  # XLA tunes on the GPU while it compiles: before anything is timed
        ready = {
            (cell, name): threads.submit(Work(cell, name, arguments.layers).compiled, own if name == "own" else None)
            for cell, own in zip(cells, ours, strict=True)
            for name in names
        }
    for cell in cells:
        row = measure(cell, arguments.layers, {name: ready.pop((cell, name)) for name in names}, arguments.kernels)
        print(row, flush=True)
        save("hybrid_bf16", [row], arguments.json)


if __name__ == "__main__":
    main()
