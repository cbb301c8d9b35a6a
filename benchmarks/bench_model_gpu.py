"""Models of the Llama-1B shape on a GPU: bijax's own, `bijax.invariant` around plain ones, and the untouched ones.

    python -m benchmarks.bench_model_gpu --layers 4
    python -m benchmarks.bench_model_gpu --layers 16 --cells train:4x2048 --params float32 --remat
    python -m benchmarks.bench_model_gpu --backend jax_triton --models own,transformed

Steps are jitted and timed by the wall clock, alternately: a token against a cache, which is donated and returned; a
prompt; value and gradient of the loss; a training step with optax's adamw, of a batch at once or by units
(`accumulate`: `bijax.accumulate_gradients` against a loop that adds gradients). They compute in bfloat16; weights are
random, those of a training step in the dtype of `--params`. What is measured:

| model | is | against |
|---|---|---|
| own | `flax_layers.Llama`, with `bijax.softmax_cross_entropy` | the faster of the two plain Llamas |
| transformed | `bijax.invariant` around the plain Llama with XLA's attention | the same without it |
| transformed_cudnn | the same with cuDNN's attention | the faster of the two plain Llamas |
| drop_in | one of Flax's layers (`nnx.MultiHeadAttention`, ...), converted and transformed | the same without it |
| drop_in_cudnn | the same with cuDNN's attention | the faster of the two plain Flax models |

The plain Llama is the same model with JAX's own operations. `ratio` is the other's time over ours. A step of decoding
is short compared with what the host does before and after it, so it is timed in more rounds, and once more in a loop,
where each step takes the cache of the previous one without waiting for it (`queued_ratio`). Peak memory is what XLA
plans: arguments, results and temporary memory. `bench_compile_gpu` measures lowering and compiling.

With `--backend`, ours are lowered under `bijax.prefer_backend`: what that backend does not serve is served as without.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

import bijax
from benchmarks.cudnn_ops import CudnnOps
from benchmarks.device_time import kernel_table
from benchmarks.flax_transformer import FlaxTransformer
from benchmarks.harness import add_json, interleaved_us, queued_us, save, show
from benchmarks.model_steps import Arrays, Cell, Loss, arrays, call, own_loss, plain_loss, step
from flax_layers import INVARIANT, PLAIN, Llama, convert
from flax_layers.checkpoint import LlamaConfig

CELLS: Final = (
    *(f"decode:{batch}x{keys}" for keys in (2048, 8192) for batch in (1, 8, 64, 256)),
    *("prefill:1x2048", "prefill:4x2048", "prefill:1x16384"),
    *("gradient:2x512", "train:4x2048", "accumulate:16x2048"),
)
TRAINING: Final = ("train", "accumulate")
MODELS: Final = ("own", "transformed", "transformed_cudnn", "drop_in", "drop_in_cudnn")

AGAINST: Final = {
    "own": ("xla", "cudnn"),
    "transformed": ("xla",),
    "transformed_cudnn": ("xla", "cudnn"),
    "drop_in": ("flax",),
    "drop_in_cudnn": ("flax", "flax_cudnn"),
}
"""The plain models; the faster one is compared."""

CONVERTED: Final = {"drop_in": "flax", "drop_in_cudnn": "flax_cudnn"}
TRANSFORMED: Final = {"transformed": "xla", "transformed_cudnn": "cudnn"}
THREADS: Final = 8
ROUNDS: Final = 3
DECODE_ROUNDS: Final = 9
DECODE_SETTLE: Final = 0.1
"""Seconds; decoding keeps a GPU far below its power limit."""


def config(layers: int, keys: int) -> LlamaConfig:
    """Returns the numbers of Llama-3.2-1B with fewer layers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=keys,
        bos_token_id=None,
        eos_token_ids=(),
    )


def models(names: Sequence[str], layers: int, keys: int, params: str, remat: bool) -> dict[str, Any]:
    """Returns the models by name; those of one family have the same parameters."""
    shape, found = config(layers, keys), {}
    dtypes: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.dtype(params)}
    if any("drop_in" not in name for name in names):
        found["xla"] = Llama(shape, ops=PLAIN, remat=remat, rngs=nnx.Rngs(0), **dtypes)
        found["cudnn"] = nnx.with_attributes(found["xla"], ops=CudnnOps())
        found["own"] = nnx.with_attributes(found["xla"], ops=INVARIANT)
    if any("drop_in" in name for name in names):
        for name, implementation in (("flax", "xla"), ("flax_cudnn", "cudnn")):
            found[name] = FlaxTransformer(shape, implementation=implementation, remat=remat, **dtypes)
        # A conversion changes a model in place: another one is made around the same parameters.
        found |= {name: convert(nnx.merge(*nnx.split(found[plain]))) for name, plain in CONVERTED.items()}
    return found


@dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        run: The program.
        peak_mib: Its arguments, results and temporary memory.
    """

    run: Any
    peak_mib: int


def compiled(made: Any, held: tuple[Any, ...], changed: int, backend: str) -> Program:
    with bijax.prefer_backend(backend) if backend else contextlib.nullcontext():
        lowered = jax.jit(made, donate_argnums=tuple(range(changed))).lower(*held)
    program = lowered.compile()
    memory = program.memory_analysis()
    if memory is None:
        raise RuntimeError("expected XLA to say how much memory a program takes, got nothing.")
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    peak = total - memory.alias_size_in_bytes
    return Program(program, round(peak / 2**20))


def programs(cell: Cell, names: Sequence[str], found: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields a name, its step and the name of the model whose arrays it takes, for what a cell compares."""
    for name in dict.fromkeys([*(plain for n in names for plain in AGAINST[n]), *names]):
        if "flax" in name or "drop_in" in name:
            if cell.kind == "decode":
                continue  # the cache of Flax's layer has one length for all sequences
            made = step(found[name], cell, plain_loss, plain=name not in CONVERTED)
            yield name, bijax.invariant(made) if name in CONVERTED else made, "flax"
            continue
        loss: Loss = own_loss if name == "own" else plain_loss
        made = step(found[TRANSFORMED.get(name, name)], cell, loss, plain=name not in AGAINST)
        yield name, bijax.invariant(made) if name in TRANSFORMED else made, "xla"


def measure(
    cell: Cell, held: dict[str, Arrays], ready: dict[str, Future[Program]], settle: float, kernels: int
) -> Iterator[dict[str, Any]]:
    """Yields the lines of the table of one cell; prints the longest kernels of each program if asked to."""
    found = {name: future.result() for name, future in ready.items()}
    calls = [lambda name=name: call(found[name].run, held[name]) for name in found]
    decodes = cell.kind == "decode"
    if decodes:
        timed = interleaved_us(calls, seconds=2, rounds=DECODE_ROUNDS, settle=min(settle, DECODE_SETTLE))
    else:
        timed = interleaved_us(calls, seconds=1, rounds=ROUNDS, settle=settle)
    times = dict(zip(found, timed, strict=True))
    queued = dict(zip(found, queued_us(calls), strict=True)) if decodes else {}
    for name, run in zip(found, calls, strict=True) if kernels else ():
        table = kernel_table(run)
        print(f"{cell}, {name}: {sum(us for *_, us in table):.0f} µs in {sum(n for _, n, _ in table):.0f} kernels")
        for kernel, count, us in table[:kernels]:
            print(f"{us:10.1f} µs in {count:6} of {kernel[:100]}", flush=True)
    for name in (n for n in found if n in AGAINST):
        plain = min(AGAINST[name], key=times.__getitem__)
        row = {"model": name, "case": str(cell), "ours_us": round(times[name], 1), "against": plain}
        row |= {"xla_us": round(times[plain], 1), "ratio": round(times[plain] / times[name], 3)}
        if queued:
            other = min(queued[other_name] for other_name in AGAINST[name])
            row |= {"queued_us": round(queued[name], 1), "xla_queued_us": round(other, 1)}
            row |= {"queued_ratio": round(other / queued[name], 3)}
        yield row | {"peak_mib": found[name].peak_mib, "plain_peak_mib": found[plain].peak_mib}


def run(cells: Sequence[Cell], names: Sequence[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the lines of cells whose models have parameters of one dtype."""
    params = arguments.params if cells[0].kind in TRAINING else "bfloat16"
    found = models(names, arguments.layers, max(cell.keys for cell in cells), params, arguments.remat)
    ready: list[dict[str, Future[Program]]] = []
    sources: list[dict[str, str]] = []
    with ThreadPoolExecutor(THREADS) as pool:  # XLA tunes on the GPU while it compiles: before anything is timed
        for cell in cells:
            ready.append({})
            sources.append({})
            for name, made, source in programs(cell, names, found):
                held = jax.eval_shape(lambda cell=cell, source=source: arrays(found[source], cell))
                backend = arguments.backend if name in AGAINST else ""
                given = (*held.changed, *held.kept)
                ready[-1][name] = pool.submit(compiled, made, given, len(held.changed), backend)
                sources[-1][name] = source
    for cell, row, source in zip(cells, ready, sources, strict=True):
        shared = {name: arrays(found[name], cell) for name in dict.fromkeys(source.values())}
        given = {name: shared[plain] for name, plain in source.items()}
        for line in measure(cell, given, row, arguments.settle, arguments.kernels):
            name = {"model": line["model"], "layers": arguments.layers}
            training = {"params": params, "remat": arguments.remat} if cell.kind in TRAINING else {}
            yield name | line | training
        row.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole models on a GPU.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cells", default=",".join(CELLS), help="as in decode:8x2048,train:4x2048")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--params", default="float32", choices=["float32", "bfloat16"], help="for training steps")
    parser.add_argument("--remat", action="store_true", help="compute blocks again in the backward pass")
    parser.add_argument("--backend", default="", help="whose kernels are preferred, as in jax_triton")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds that a program runs before it is timed")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each program, longest first")
    add_json(parser)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"expected models among {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    cells = [Cell.parse(text) for text in arguments.cells.split(",")]
    rows = []
    for kinds in (("decode", "prefill"), ("gradient",), TRAINING):
        if some := [cell for cell in cells if cell.kind in kinds]:
            for row in run(some, names, arguments):
                print(row, flush=True)
                rows.append(row)
    name = "model_bf16" + (f"_{arguments.backend}" if arguments.backend else "")
    show(name, rows)
    save(name, rows, arguments.json)


if __name__ == "__main__":
    main()
