"""Tokens a second of the engine, against the same engine with JAX's own operations, and against a static batch.

    python -m benchmarks.bench_engine --json FILE --plot FILE

Requests of mixed lengths, half of them sampled, are served by both engines alternately, and once more without
dispatching ahead. `ratio` is ours over plain: by the wall clock, best round of each, and by the processor time of the
process, which other work on the machine disturbs less. Then a step of the largest batch, all sequences decoding:
`step_ms` of the engine, `model_ms` of the model alone (blocks and logits of a static batch of that size), `overhead`,
which is what the step takes longer, scheduling and sampling, and `plan_ms`, the host's planning; with `_cpu` by the
processor time.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import add_json, device_words, save
from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.serving.batches import cut
from bijax.serving.model import Model
from bijax.serving.toy import ToyModel


def read_model(path: str | None) -> Model:
    if path == "toy":
        return ToyModel.random(seed=0)
    from flax_layers import Llama, ServedLlama
    from flax_layers.checkpoint import load_checkpoint, smollm2_path

    return ServedLlama(Llama.from_checkpoint(load_checkpoint(smollm2_path() if path is None else Path(path))))


def requests(number: int, vocab_size: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 16, longest // 2, number)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
    params = [
        SamplingParams(max_new_tokens=int(n), temperature=float(t), seed=i, ignore_eos=True)
        for i, (n, t) in enumerate(
            zip(rng.integers(8, longest // 4, number), rng.choice([0, 0.8], number), strict=True)
        )
    ]
    return prompts, params


def serve(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, float, Any]:
    """Returns tokens a second of wall time and of processor time, and all tokens."""
    engine.flush_cache()
    start, used = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, params)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    tokens = [c.tokens for o in outputs for c in o.completions]
    number = sum(map(len, tokens))
    return number / seconds, number / used, tokens


def largest_batch(engine: Engine, prompt: list[int], rounds: int) -> dict[str, float]:
    """Returns the parts of a step in which as many sequences decode as may run, the least of all rounds of each."""
    running = engine.options.max_running
    for index in range(running):
        params = SamplingParams(max_new_tokens=rounds + 60, ignore_eos=True, temperature=0.8 * (index % 2))
        engine.add(prompt[:8], params)
    while engine.stats().num_waiting:
        engine.step(watched=())
    programs = engine._programs
    times: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    alone = programs.model
    held = [alone.init_pages(engine.options.num_pages, engine.options.page_size)]
    table = jnp.arange(running * programs.slots.table.shape[1], dtype=jnp.int32).reshape(running, -1)
    table %= engine.options.num_pages
    tokens, ones = jnp.zeros((running, 1), jnp.int32), jnp.ones(running, jnp.int32)

    def timed(name: str, part: Callable[[], Any]) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(part())
        times.setdefault(name, []).append(time.perf_counter() - start)
        used.setdefault(name, []).append(time.process_time() - cpu)

    def plan() -> None:
        for batch in cut(engine._scheduler.plan(), programs.sizes):
            batch.packed(programs.slots)

    def step() -> Any:
        engine.step(watched=())
        return programs._last, programs._pages

    def model() -> Any:
        start = len(times.get("model_ms", ())) + 8
        hidden, held[0] = alone.extend(held[0], tokens, table, start * ones, ones)
        return alone.logits(hidden[:, 0]), held[0]

    step()
    for _ in range(rounds):
        # Planned twice: the second plan, in the step, finds the pages that the first one gave.
        for name, part in (("plan_ms", plan), ("step_ms", step), ("model_ms", model)):
            timed(name, part)
    for name in list(engine._requests):
        engine.abort(name)
    least = {name: round(min(found) * 1e3, 3) for name, found in times.items()}
    least |= {f"{name}_cpu": round(min(found) * 1e3, 3) for name, found in used.items()}
    least["overhead"] = round(1 - least["model_ms"] / least["step_ms"], 4)
    least["overhead_cpu"] = round(1 - least["model_ms_cpu"] / least["step_ms_cpu"], 4)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="checkpoint, or 'toy'; SmolLM2 by default")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=256, help="about the longest sequence")
    add_json(parser)
    parser.add_argument("--plot", type=Path, default=None)
    EngineOptions.add_flags(parser)
    parsed = parser.parse_args()
    model = read_model(parsed.model)
    given = EngineOptions.from_flags(parsed)
    prompts, params = requests(parsed.requests, model.vocab_size, parsed.longest)
    ways = {
        "bijax": {},
        "plain": {"enable_deterministic_inference": False},
        "bijax, reading first": {"dispatch_ahead": False},
    }
    engines: dict[str, Engine] = {}
    expected = None
    for name, changes in ways.items():
        # Plain attention reads as many pages as a sequence may have.
        options: dict[str, Any] = vars(given) | {"max_length": given.max_length or parsed.longest} | changes
        engines[name] = Engine(model, options=EngineOptions(**options))
        start = time.perf_counter()
        *_, tokens = serve(engines[name], prompts, params)  # compiles what the rounds run
        print(f"{name}: first round {time.perf_counter() - start:.1f} s", flush=True)
        if name != "plain":
            if expected not in (None, tokens):
                raise RuntimeError("dispatching ahead changed tokens; nothing is timed")
            expected = tokens
    wall: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(parsed.rounds):
        for name, engine in engines.items():
            by_wall, by_cpu, tokens = serve(engine, prompts, params)
            if name != "plain" and tokens != expected:
                raise RuntimeError("the engine gave other tokens in another round")
            wall[name].append(round(by_wall, 2))
            cpu[name].append(round(by_cpu, 2))
    best = {name: max(found) for name, found in wall.items()}
    most = {name: max(found) for name, found in cpu.items()}
    result = {
        "requests": parsed.requests,
        "longest": parsed.longest,
        "options": {n: v for n, v in vars(given).items() if v is not None},
        "tokens_per_s": wall,
        "tokens_per_cpu_s": cpu,
        "ratio": round(best["bijax"] / best["plain"], 3),
        "ratio_cpu": round(most["bijax"] / most["plain"], 3),
        "ahead": round(best["bijax"] / best["bijax, reading first"], 3),
        "largest_batch": largest_batch(engines["bijax"], prompts[0], 20),
    }
    print(json.dumps(result, indent=1))
    if parsed.model is None or parsed.json is not None:
        save("engine_smollm2", [result], parsed.json, load=round(os.getloadavg()[0], 1))
    if parsed.plot is not None:
        plot(result, parsed.plot)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws tokens a second of each round, and the parts of a step."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, found in result["tokens_per_s"].items():
        left.plot(range(1, len(found) + 1), found, "o-", label=name)
    left.set(xlabel="round", ylabel="tokens a second", title=f"{result['requests']} requests", ylim=(0, None))
    left.legend()
    parts = result["largest_batch"]
    names = [name for name in ("model_ms", "step_ms", "plan_ms") if name in parts]
    right.barh([name.removesuffix("_ms") for name in names], [parts[name] for name in names])
    right.set(xlabel="ms", title="a step of the largest batch")
    figure.suptitle(f"{device_words()}, jax {jax.__version__}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
