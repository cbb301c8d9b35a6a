"""Tokens a second of the engine, against the same engine with JAX's own operations, and without dispatching ahead.

`python -m benchmarks.bench_engine --json FILE` serves the same requests of mixed lengths with both, in turns, and
prints tokens a second, their ratio, and the share of the host's work in a step of the largest batch.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

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


def serve(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Returns tokens a second."""
    engine.flush_cache()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params)
    tokens = sum(len(c.tokens) for o in outputs for c in o.completions)
    return tokens / (time.perf_counter() - start)


def host_share(engine: Engine, prompts: list[list[int]], rounds: int = 20) -> float:
    """Returns the time of planning and of making arrays, over that of whole steps, where all sequences decode."""
    running = engine.options.max_running
    for index in range(running):
        engine.add(prompts[index % len(prompts)][:8], SamplingParams(max_new_tokens=rounds + 60, ignore_eos=True))
    while engine.stats().num_waiting:
        engine.step()
    engine.step()
    host = whole = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        # Planned twice: the second plan, in the step, finds the pages that the first one gave.
        for batch in cut(engine._scheduler.plan(), engine._programs.sizes):
            batch.arrays(engine._programs.slots)
        host += time.perf_counter() - start
        start = time.perf_counter()
        engine.step()
        whole += time.perf_counter() - start
    for name in list(engine._requests):
        engine.abort(name)
    return host / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="checkpoint, or 'toy'; SmolLM2 by default")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=256, help="about the longest sequence")
    parser.add_argument("--json", type=Path, default=None)
    EngineOptions.add_flags(parser)
    parsed = parser.parse_args()
    model = read_model(parsed.model)
    given = EngineOptions.from_flags(parsed)
    prompts, params = requests(parsed.requests, model.vocab_size, parsed.longest)
    engines: dict[str, Engine] = {}
    ways = {
        "bijax": {},
        "plain": {"enable_deterministic_inference": False},
        "bijax, reading first": {"dispatch_ahead": False},
    }
    for name, changes in ways.items():
        options: dict[str, Any] = vars(given) | changes
        engines[name] = Engine(model, options=EngineOptions(**options))
        start = time.perf_counter()
        engines[name].warm_up()
        print(f"{name}: warm-up {time.perf_counter() - start:.1f} s", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(parsed.rounds):
        for name, engine in engines.items():
            speeds[name].append(serve(engine, prompts, params))
    best = {name: max(found) for name, found in speeds.items()}
    result = {
        "tokens_per_s": best,
        "ratio": best["bijax"] / best["plain"],
        "ahead": best["bijax"] / best["bijax, reading first"],
        "host_share": host_share(engines["bijax"], prompts),
        "requests": parsed.requests,
        "options": {n: v for n, v in vars(given).items() if v is not None},
    }
    print(json.dumps(result, indent=1))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
