"""Row operations on a GPU: XLA's default and ours in the same run, and the floor that memory sets.

    python -m benchmarks.bench_rows --ops softmax,log_softmax --dtypes float32
    python -m benchmarks.bench_rows --backend jax_triton

Times are device times of all kernels of a call (CUPTI), medians over calls that cycle through copies of the arguments,
so that small arrays do not stay in the L2 cache. The floor is the time of a plain copy, at the bandwidth measured in
the same run, of every array once in and once out. Temporary memory is what XLA's memory analysis says; there are always
some float32 numbers for each row, so only what is over 1 % of x counts. The file is written after every operation.
"""

import argparse
import contextlib
import itertools
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.device_time import copy_bytes_per_us, device_time_us
from benchmarks.harness import add_json, cell, save
from benchmarks.row_operations import OPERATIONS, Function, Operation, Shape, operands
from benchmarks.workers import Workers

COLUMNS = (128, 576, 2048, 4096, 8192, 32000, 128256)

LARGEST_BYTES = 4 << 30
ROTATED_BYTES = 250_000_000  # several times the L2 cache
MOST_COPIES = 16
POOL_ELEMENTS = 1 << 29
NEGLIGIBLE_BYTES = 1 << 16  # of temporary memory; the numbers of few rows
CALL_US = 4_000  # calls of one cell together take about this long
THREADS = 16


class Arguments:
    """Arrays for the programs, cut out of one pool on the device; several of the small ones."""

    def __init__(self) -> None:
        self._pool = jax.jit(lambda key: jax.random.normal(key, (POOL_ELEMENTS,), jnp.float32))(jax.random.key(0))
        self._made: dict[Shape, list[dict[str, jax.Array]]] = {}

    def make(self, shape: Shape) -> None:
        """Makes at least two copies of what is named in `Operation.arguments`."""
        m, c, dtype = shape
        size = m * c
        copies = max(2, min(MOST_COPIES, math.ceil(ROTATED_BYTES / (size * jnp.dtype(dtype).itemsize))))
        repeats = -(-size // POOL_ELEMENTS)
        part = -(-size // repeats)

        @jax.jit
        def cut(pool: jax.Array, start: jax.Array) -> dict[str, jax.Array]:
            x = jax.lax.dynamic_slice_in_dim(pool, start, part).astype(dtype)
            labels = jnp.arange(m, dtype=jnp.int32) * 7919 % c
            return {"x": jnp.tile(x, repeats)[:size].reshape(m, c), "w": x[:c], "labels": labels}

        room = max(POOL_ELEMENTS - part, 1)
        made = [cut(self._pool, jnp.int32(i * 1_000_003 % room)) for i in range(copies)]
        self._made[shape] = [{**one, "g": made[i - 1]["x"]} for i, one in enumerate(made)]

    def of(self, names: tuple[str, ...], shape: Shape) -> list[tuple[jax.Array, ...]]:
        """Returns one tuple of arguments for each copy."""
        return [tuple(one[name] for name in names) for one in self._made[shape]]


def main() -> None:
    arguments = parse()
    if jax.default_backend() != "gpu":
        print(f"bench_rows needs a GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    deadline = time.monotonic() + arguments.limit_s
    bandwidth = copy_bytes_per_us()
    print(f"a plain copy reads and writes {bandwidth / 1e6:.2f} TB/s", flush=True)
    made = Arguments()
    cells: list[dict[str, Any]] = []
    failed: list[str] = []
    name_of_file = "rows" if arguments.backend == "hopper" else f"rows_{arguments.backend}"
    with ThreadPoolExecutor(THREADS) as pool, contextlib.ExitStack() as stack:
        workers = None if arguments.backend == "hopper" else stack.enter_context(Workers())
        ours = {name: [] for name in arguments.ops} if workers is None else lowered(workers, arguments)
        list(pool.map(made.make, {s: None for name in arguments.ops for s in shapes_of(OPERATIONS[name], arguments)}))
        for name in arguments.ops:
            if time.monotonic() > deadline:
                print(f"The limit of {arguments.limit_s} s is reached before {name}.")
                break
            start = time.monotonic()
            operation = OPERATIONS[name]
            shapes = shapes_of(operation, arguments)
            programs = compile_all(pool, operation, shapes, ours[name])
            compiled_s = time.monotonic() - start
            for shape, pair in zip(shapes, programs, strict=True):
                try:
                    if time.monotonic() > deadline:
                        raise TimeoutError("the limit is reached")
                    cells.append(measure(name, shape, [p.result() for p in pair], made, bandwidth))
                except Exception as error:
                    failed.append(f"{name} {shape}: {type(error).__name__}: {error}"[:300])
                    print(failed[-1], flush=True)
            if cells:
                more = {"copy_tb_per_s": round(bandwidth / 1e6, 3), "failed": failed}
                save(name_of_file, cells, arguments.json, **more)
            show(name, cells)
            print(f"{name}: compiled in {compiled_s:.0f} s, {time.monotonic() - start:.0f} s in all", flush=True)
    print(f"{len(cells)} cells, {len(failed)} failed")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=operations, default=tuple(OPERATIONS), help="names, separated by commas")
    parser.add_argument("--dtypes", type=names, default=("bfloat16", "float32"), help="names, separated by commas")
    parser.add_argument("--backend", choices=("hopper", "jax_triton"), default="hopper", help="whose kernels are ours")
    parser.add_argument("--rows", type=integers, help="numbers of rows, separated by commas")
    parser.add_argument("--columns", type=integers, default=COLUMNS, help="numbers of columns, separated by commas")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="measure nothing more after this time")
    add_json(parser)
    return parser.parse_args()


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def operations(text: str) -> tuple[str, ...]:
    unknown = set(names(text)) - set(OPERATIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(OPERATIONS)}, got {', '.join(unknown)}.")
    return names(text)


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def bytes_of(operation: Operation, shape: Shape) -> int:
    m, c, dtype = shape
    return operation.passes * m * c * jnp.dtype(dtype).itemsize


def shapes_of(operation: Operation, arguments: argparse.Namespace) -> list[Shape]:
    shapes = itertools.product(arguments.rows or operation.rows, arguments.columns, arguments.dtypes)
    return [shape for shape in shapes if bytes_of(operation, shape) <= LARGEST_BYTES]


class Job(NamedTuple):
    """Our program of one cell, which a worker process lowers."""

    name: str
    shape: Shape
    backend: str

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return operands(OPERATIONS[self.name], self.shape)

    @property
    def result(self) -> Any:
        return jax.eval_shape(OPERATIONS[self.name].ours, *self.operands)

    def function(self, *arrays: Any) -> Any:
        return OPERATIONS[self.name].ours(*arrays)


def lowered(workers: Workers, arguments: argparse.Namespace) -> dict[str, list[Future[Any]]]:
    """Starts to compile our programs of all cells, with kernels that take long to lower in this process."""
    return {
        name: [workers.ours(Job(name, s, arguments.backend)) for s in shapes_of(OPERATIONS[name], arguments)]
        for name in arguments.ops
    }


def compile_all(
    pool: ThreadPoolExecutor, operation: Operation, shapes: list[Shape], ours: list[Future[Any]]
) -> list[list[Future[Any]]]:
    """Compiles XLA's and our program for every shape side by side, before anything is timed; ours unless given."""

    def compiled(function: Function, shape: Shape) -> Any:
        # A function of its own for each program, or the caches of tracing would be shared between threads.
        return jax.jit(lambda *arrays: function(*arrays)).lower(*operands(operation, shape)).compile()

    theirs = [pool.submit(compiled, operation.theirs, shape) for shape in shapes]
    ours = ours or [pool.submit(compiled, operation.ours, shape) for shape in shapes]
    pending = [list(pair) for pair in zip(theirs, ours, strict=True)]
    for one in itertools.chain(*pending):
        one.exception()
    return pending


def measure(name: str, shape: Shape, programs: list[Any], made: Arguments, bandwidth: float) -> dict[str, Any]:
    """Times XLA's and our program of one cell."""
    operation = OPERATIONS[name]
    floor_us = bytes_of(operation, shape) / bandwidth
    calls = int(min(16, max(5, CALL_US / floor_us)))
    arrays = made.of(operation.arguments, shape)
    xla_us, ours_us = (device_time_us(program, arrays, calls) for program in programs)
    xla_bytes, ours_bytes = (p.memory_analysis().temp_size_in_bytes for p in programs)
    m, c, dtype = shape
    return {
        **cell(ours_us, xla_us, rows=m, columns=c, op=name, dtype=dtype),
        "floor_us": round(floor_us, 2),
        "ours_temp_bytes": ours_bytes,
        "xla_temp_bytes": xla_bytes,
    }


def size_of(cell: dict[str, Any]) -> int:
    """Returns the bytes of x."""
    return cell["rows"] * cell["columns"] * jnp.dtype(cell["dtype"]).itemsize


def show(name: str, cells: list[dict[str, Any]]) -> None:
    """Prints one line for each dtype and number of columns: rows, XLA's time, ours, (the floor)."""
    mine = [c for c in cells if c["op"] == name]
    for dtype, columns in sorted({(c["dtype"], c["columns"]) for c in mine}):
        line = (
            f"{c['rows']}: {c['xla_us']:.1f} {c['ours_us']:.1f} ({c['floor_us']:.1f})"
            for c in mine
            if (c["dtype"], c["columns"]) == (dtype, columns)
        )
        print(f"{name} {dtype} {columns}  " + "  ".join(line))
    if mine:
        ratios = [c["ratio"] for c in mine]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        more = sum(c["ours_temp_bytes"] - c["xla_temp_bytes"] > NEGLIGIBLE_BYTES + size_of(c) / 100 for c in mine)
        print(
            f"{name}: geometric mean {mean:.3f}, worst {min(ratios)}; "
            f"more temporary memory than XLA, by over 1 % of x, in {more} cells"
        )


if __name__ == "__main__":
    main()
