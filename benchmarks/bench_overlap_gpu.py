"""Two batch and single batch overlap on two GPUs against none: the same bits, and the time of a step.

    python -m benchmarks.bench_overlap_gpu
    python -m benchmarks.bench_overlap_gpu --cases 32x512 --programs none,two_batch --kernels 15

The model has the width of Qwen3-30B-A3B, two layers and a small vocabulary, in bfloat16; heads and experts are cut over
two GPUs. A cell is a step of all blocks without the vocabulary. `none_us` is the time without overlap in the same run,
and `differing` counts elements of the residual stream with other bits than without.

Programs: `none`, `two_batch`, `single_batch`; with ` early` XLA starts collectives early and lets several be on their
way (the options `EARLY`).
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from benchmarks.device_time import kernel_table
from benchmarks.harness import add_json, queued_us, save, show
from bijax.parallel import Overlap
from flax_layers import Llama, Routing, ServedLlama
from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.experts import ExpertsConfig

SIZES: Final = {"hidden": 2048, "heads": 32, "kv_heads": 8, "head": 128, "inner": 768, "experts": 128, "topk": 8}
TINY: Final = {"hidden": 256, "heads": 8, "kv_heads": 8, "head": 64, "inner": 128, "experts": 8, "topk": 2}
CASES: Final = ("8x512", "32x512", "32x1024", "128x1")
"""Sequences, and new tokens of each: one is decoding."""
CONTEXT: Final = 1024
PAGE: Final = 128
EARLY: Final = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}
PROGRAMS: Final = ("none", "none early", "two_batch", "two_batch early", "single_batch", "single_batch early")
THREADS: Final = 12


def mesh(devices: Sequence[Any]) -> Mesh:
    return jax.make_mesh((len(devices),), ("model",), axis_types=(AxisType.Auto,), devices=devices)


def model(sizes: dict[str, int], layers: int) -> Llama:
    routing = Routing(num_experts=sizes["experts"], topk=sizes["topk"])
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_layers=layers,
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head"],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_ids=(),
        qk_norm=True,
        experts=ExpertsConfig(intermediate_size=sizes["inner"], routing=routing),
    )
    return Llama(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


class Program:
    """A step of a served model on pages of its own, which it updates.

    Args:
        served: The model on a mesh.
        name: One of `PROGRAMS`.
        sequences: Their number.
        length: New tokens of each.
    """

    def __init__(self, served: Any, name: str, sequences: int, length: int) -> None:
        kind, _, how = name.partition(" ")
        overlap: Any = None if kind == "none" else Overlap(kind)  # type: ignore[arg-type]
        self.served = served.overlapped(overlap)
        self.served.one_program = True
        self.options: dict[str, Any] = dict(EARLY) if how else {}
        pages = CONTEXT // PAGE
        self.sequences = sequences
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, served.vocab_size, (sequences, length)).astype(np.int32)
        table = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
        start = np.full(sequences, 0 if length > 1 else CONTEXT - 1, np.int32)
        self.given = (tokens, table, start, np.full(sequences, length, np.int32))
        self.pages: Any = None
        self._run: Any = None

    def lower(self) -> Any:
        leaves, tree = jax.tree.flatten(self.served)
        self.leaves = leaves

        def run(pages: Any, leaves: Any, *given: jax.Array) -> Any:
            return jax.tree.unflatten(tree, leaves).extend(pages, *given)

        self.pages = self.served.init_pages(self.sequences * CONTEXT // PAGE, PAGE)
        return jax.jit(run, donate_argnums=0).lower(self.pages, leaves, *self.given)

    def compile(self) -> "Program":
        self._run = self.lower().compile(self.options or None)
        return self

    def __call__(self) -> jax.Array:
        hidden, self.pages = self._run(self.pages, self.leaves, *self.given)
        found: jax.Array = hidden
        return found


def differing(programs: dict[str, Program]) -> dict[str, int]:
    """Returns for each program how many elements differ in bits from those of "none"."""
    found = {name: np.asarray(program()).view(np.uint16) for name, program in programs.items()}
    return {name: int((bits != found["none"]).sum()) for name, bits in found.items()}


def measured(case: str, programs: dict[str, Program], rounds: int) -> list[dict[str, Any]]:
    unlike = differing(programs)
    calls: list[Callable[[], Any]] = list(programs.values())
    times = dict(zip(programs, queued_us(calls, repeats=20, rounds=rounds), strict=True))
    return [
        {
            "case": case,
            "program": name,
            "ours_us": round(us, 1),
            "none_us": round(times["none"], 1),
            "ratio": round(times["none"] / us, 3),
            "differing": unlike[name],
        }
        for name, us in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlap on two GPUs against none.")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of both GPUs, longest first")
    add_json(parser)
    arguments = parser.parse_args()
    if len(jax.devices()) < 2:
        parser.error(f"expected two GPUs, got {len(jax.devices())} device")
    whole = model(TINY if arguments.tiny else SIZES, arguments.layers)
    served = ServedLlama(whole).partitioned(mesh(jax.devices()[:2]))
    rows: list[dict[str, Any]] = []
    for case in arguments.cases.split(","):
        sequences, length = (int(number) for number in case.split("x"))
        programs = {name: Program(served, name, sequences, length) for name in arguments.programs.split(",")}
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(Program.compile, programs.values()))
        print("compiled", case, flush=True)
        for row in measured(f"{'decode' if length == 1 else 'prefill'} {case}", programs, arguments.rounds):
            print(row, flush=True)
            rows.append(row)
        for name, program in programs.items() if arguments.kernels else ():
            for kernel, count, us in kernel_table(program)[: arguments.kernels]:
                print(f"{name}: {us:10.1f} µs in {count:6} of {kernel[:100]}", flush=True)
        save("overlap", rows, arguments.json)
    show("overlap", rows)


if __name__ == "__main__":
    main()
