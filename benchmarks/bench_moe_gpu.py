"""Products of rows in groups (experts) and of int8 matrices on a Hopper GPU, against XLA's in the same run.

    python -m benchmarks.bench_moe_gpu --limit-s 400

Grouped products: 8, 64 and 256 experts of DeepSeek-V3 and Qwen3-MoE, rows divided evenly, by Zipf's law or all to one
expert. XLA's times are the smaller of `jax.lax.ragged_dot` (left out where it would multiply all rows by all experts
for more than a few ms) and of a loop of dots whose sizes are known when it is compiled. int8: XLA's dot followed by
the same scales, and our product of bfloat16. float8: XLA's dot of float8 matrices with scales, which sums as its
library does. Layers: router, experts and their sum, in one program, against the fastest form in plain JAX: by
`ragged_dot`, with all tokens by all experts, or with copies of the weights of a few tokens' experts. Times are device
times of all kernels of a call, medians; layers are also timed by the wall clock.
"""

import argparse
import functools
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import device_time_us, in_turns_us
from benchmarks.harness import add_json, cell, interleaved_us, save
from benchmarks.moe_layers import LAYERS, TOKENS, MoELayer
from benchmarks.workers import Job, Workers
from pallas_kernels.contract import Float8Contract, QuantContract, WgmmaContract
from pallas_kernels.matmul.hopper.groups import group_matmul
from pallas_kernels.matmul.hopper.int8 import quant_matmul

PRODUCTS: Final = {
    "DeepSeek-V3 up": (7168, 4096),
    "DeepSeek-V3 down": (2048, 7168),
    "Qwen3-MoE up": (2048, 1536),
    "Qwen3-MoE down": (768, 2048),
}
EXPERTS: Final = (8, 64, 256)
ROWS: Final = (64, 512, 4096, 65536)
LOADS: Final = ("balanced", "Zipf", "one expert")
INT8: Final = (
    *((m, 4096, 4096) for m in (1, 8, 64, 512, 4096)),
    *((m, 4096, 14336) for m in (8, 64, 512)),
    (8192, 8192, 8192),
)
FLOAT8: Final = "float8_e4m3fn"
FLOAT8_SHAPES: Final = ((8, 4096, 4096), (64, 4096, 14336), (512, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192))

ROTATED_BYTES: Final = 250_000_000  # several times the L2 cache
PARTS: Final = ("layers", "int8", "float8", "groups")
MOST_FLOP: Final = 5e12  # of a ragged_dot that multiplies all rows by all weights
MOST_ERROR: Final = 0.05  # of a layer's programs, which round at other places
MOST_BYTES: Final = 16_000_000_000  # of weights
CALLS: Final = 8


class Groups(NamedTuple):
    """Rows (M, K) in groups by weights (G, K, N), bfloat16."""

    m: int
    groups: int
    k: int
    n: int

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes = ((self.m, self.k), "bfloat16"), ((self.groups, self.k, self.n), "bfloat16"), ((self.groups,), "int32")
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), "bfloat16")

    def function(self, x: Any, w: Any, sizes: Any) -> Any:
        return group_matmul(x, w, sizes, contract=WgmmaContract())


class Bytes(NamedTuple):
    """Matrices of 8 bits, (M, K) by (N, K), or (K, N) where it is not `along_k`, with scales."""

    m: int
    k: int
    n: int
    along_k: bool
    dtype: str = "int8"

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        w = (self.n, self.k) if self.along_k else (self.k, self.n)
        shapes = ((self.m, self.k), self.dtype), (w, self.dtype), ((self.m,), "float32"), ((self.n,), "float32")
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), "bfloat16")

    def function(self, x: Any, w: Any, row: Any, column: Any) -> Any:
        contract = QuantContract() if self.dtype == "int8" else Float8Contract("wgmma32")
        return quant_matmul(x, w, row, column, contract=contract, transpose_w=self.along_k)

    def stock(self, x: Any, w: Any, row: Any, column: Any) -> Any:
        dims = (((1,), (1 if self.along_k else 0,)), ((), ()))
        sums = jnp.int32 if self.dtype == "int8" else jnp.float32
        total = jax.lax.dot_general(x, w, dims, preferred_element_type=sums)
        return (total.astype(jnp.float32) * row[:, None] * column).astype(jnp.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=integers, default=EXPERTS, help="numbers of experts, separated by commas")
    parser.add_argument("--rows", type=integers, default=ROWS, help="numbers of rows, separated by commas")
    parser.add_argument("--loads", default=",".join(LOADS), help="how rows are shared out, separated by commas")
    parser.add_argument("--only", choices=PARTS, help="one part of the benchmark")
    parser.add_argument("--layers", default="", help="a part of the names of whole layers")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no other shape after this time")
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_moe_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    deadline = time.monotonic() + arguments.limit_s
    wanted = [arguments.only] if arguments.only else PARTS

    def keep(name: str, cells: list[dict[str, Any]]) -> None:
        if cells:
            save(name, cells, arguments.json)

    if "layers" in wanted:
        keep("moe_layer", layer_cells(arguments.layers, deadline))
    if "int8" in wanted:
        jobs = [Bytes(*shape, along_k) for shape in INT8 for along_k in (True, False)]
        keep("quant_matmul", byte_cells(jobs, deadline))
    if "float8" in wanted:
        jobs = [Bytes(*shape, True, FLOAT8) for shape in FLOAT8_SHAPES]
        keep("float8_matmul", byte_cells(jobs, deadline))
    if "groups" in wanted:
        shapes = [
            (name, Groups(m, g, k, n))
            for name, (k, n) in PRODUCTS.items()
            for g in arguments.experts
            for m in arguments.rows
        ]
        with Workers() as workers:
            keep("group_matmul", group_cells(workers, shapes, arguments.loads.split(","), deadline))


def byte_cells(jobs: list[Bytes], deadline: float) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for job in jobs:
        if time.monotonic() > deadline:
            break
        wide = Job(job.m, job.k, job.n, "bfloat16")
        forms = (job.function, job.operands), (job.stock, job.operands), (wide.function, wide.operands)
        with ThreadPoolExecutor(len(forms)) as threads:
            ours, theirs, bfloat16 = threads.map(lambda form: jax.jit(form[0]).lower(*form[1]).compile(), forms)
        copies = max(2, min(64, math.ceil(ROTATED_BYTES / (job.k * job.n))))
        sets = [arrays(i, job.operands) for i in range(copies)]
        times = in_turns_us([ours, theirs], sets, max(CALLS, copies))
        sets = [arrays(i, wide.operands) for i in range(max(2, copies // 2))]
        ours_16 = device_time_us(bfloat16, sets, max(CALLS, copies // 2))
        shape: dict[str, Any] = {"dtype": job.dtype, "m": job.m, "k": job.k, "n": job.n}
        shape["weights"] = "(N, K)" if job.along_k else "(K, N)"
        cells.append(cell(*times, **shape, bfloat16_us=round(ours_16, 2)))
        print(cells[-1], flush=True)
    return cells


def layer_cells(only: str, deadline: float) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for quantized, layer in itertools.product((False, True), (one for one in LAYERS if only in one.name)):
        copies = max(1, min(2, math.ceil(ROTATED_BYTES / layer.bytes_of_weights(quantized))))
        make = jax.jit(layer.make, static_argnums=1)
        made = [make(jax.random.key(i), quantized) for i in range(copies)]
        for tokens in TOKENS:
            if time.monotonic() > deadline:
                return cells
            shape = {"layer": layer.name, "dtype": "int8" if quantized else "bfloat16", "tokens": tokens}
            given = [(*arrays(i, (layer.tokens(tokens),)), weights) for i, weights in enumerate(made)]
            cells.append(layer_cell(shape, layer_programs(layer, quantized, tokens), given))
            print(cells[-1], flush=True)
    return cells


def layer_programs(layer: MoELayer, quantized: bool, tokens: int) -> dict[str, Any]:
    """Compiles all forms of a layer."""
    weights = jax.eval_shape(lambda key: layer.make(key, quantized), jax.random.key(0))
    functions = {"ours": layer.ours, **layer.plain(tokens, quantized)}
    with ThreadPoolExecutor(len(functions)) as threads:
        compiled = threads.map(lambda f: jax.jit(f).lower(layer.tokens(tokens), weights).compile(), functions.values())
        return dict(zip(functions, compiled, strict=True))


def layer_cell(shape: dict[str, Any], programs: dict[str, Any], given: list[Any]) -> dict[str, Any]:
    """Times a layer by every form, on the tokens and weights of several sets."""
    ours = programs["ours"](*given[0])
    distance = {name: float(relative_error(program(*given[0]), ours)) for name, program in programs.items()}
    if not max(distance.values()) < MOST_ERROR:
        raise RuntimeError(f"expected programs of one layer {shape}, got relative distances {distance} from ours.")
    device = dict(zip(programs, in_turns_us(list(programs.values()), given, CALLS // 2), strict=True))
    calls = [functools.partial(program, *given[0]) for program in programs.values()]
    wall = dict(zip(programs, interleaved_us(calls, seconds=0.1, rounds=3), strict=True))
    best = min((name for name in device if name != "ours"), key=lambda name: device[name])
    others = {f"{name}_us": round(us, 1) for name, us in device.items() if name != "ours"}
    times = {"ours_wall_us": round(wall["ours"], 1), "plain_wall_us": round(wall[best], 1)}
    return cell(device["ours"], device[best], **shape, plain=best, **times, **others)


@jax.jit
def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
    x, y = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.sum(y**2))


def group_cells(
    workers: Workers, shapes: list[tuple[str, Groups]], loads: list[str], deadline: float
) -> list[dict[str, Any]]:
    shapes = [(name, job) for name, job in shapes if 2 * math.prod(job[1:]) <= MOST_BYTES]
    ours = {job: workers.ours(job) for _, job in shapes}
    cells: list[dict[str, Any]] = []
    for name, job in shapes:
        if time.monotonic() > deadline:
            break
        stock = {load: workers.xla(job, loop_of(shared_out(load, job.m, job.groups))) for load in loads}
        ragged = workers.xla(job, jax.lax.ragged_dot) if 2.0 * math.prod(job) <= MOST_FLOP else None
        for program in (*stock.values(), *(() if ragged is None else (ragged,))):
            program.result()
        copies = max(1, min(16, math.ceil(ROTATED_BYTES / (2 * math.prod(job[1:])))))
        sets = [arrays(i, job.operands[:2]) for i in range(copies)]
        for load in loads:
            sizes = shared_out(load, job.m, job.groups)
            given = [(*one, jnp.asarray(sizes)) for one in sets]
            programs = [f.result() for f in (ours[job], stock[load], *([] if ragged is None else [ragged]))]
            ours_us, loop_us, *others_us = in_turns_us(programs, given, CALLS // 2)
            ragged_us = others_us[0] if others_us else math.inf
            others = {
                "loop_us": round(loop_us, 2),
                **({} if ragged is None else {"ragged_dot_us": round(ragged_us, 2)}),
            }
            shape = {"layer": name, "experts": job.groups, "rows": job.m, "k": job.k, "n": job.n, "load": load}
            cells.append(cell(ours_us, min(loop_us, ragged_us), **shape, **others))
            print(cells[-1], f"{2e-6 * job.m * job.k * job.n / ours_us:.0f} TFLOP/s", flush=True)
    return cells


def loop_of(sizes: np.ndarray) -> Any:
    """Returns a program with one dot for each group that has rows."""
    ends = np.cumsum(sizes)

    def multiply(x: Any, w: Any, _: Any) -> Any:
        parts = [x[e - s : e] @ w[i] for i, (e, s) in enumerate(zip(ends, sizes, strict=True)) if s]
        return jnp.concatenate(parts)

    return multiply


def shared_out(load: str, m: int, groups: int) -> np.ndarray:
    """Returns the rows of each group."""
    if load == "balanced":
        return (np.full(groups, m // groups) + (np.arange(groups) < m % groups)).astype(np.int32)
    if load == "one expert":
        return np.where(np.arange(groups) == groups // 3, m, 0).astype(np.int32)
    rng, weights = np.random.default_rng(0), 1 / np.arange(1, groups + 1)
    return rng.multinomial(m, rng.permutation(weights / weights.sum())).astype(np.int32)


@functools.cache
def maker(operands: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, len(operands))
        return tuple(
            jax.random.randint(k, a.shape, -127, 128, a.dtype)
            if a.dtype == jnp.int8
            else jax.random.normal(k, a.shape).astype(a.dtype)
            for k, a in zip(keys, operands, strict=True)
        )

    return jax.jit(make)


def arrays(seed: int, operands: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Returns random operands."""
    made: tuple[jax.Array, ...] = maker(operands)(jax.random.key(seed))
    return made


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
