"""The engine on a GPU: a Llama of the 1B shape with random weights, in bfloat16, 64 requests at once.

    python -m benchmarks.bench_engine_gpu --layers 4 --json FILE

The same requests are served by the engine, by the engine with JAX's own operations, and by a static batch: the jitted
model alone, whose most probable tokens go into its next call, at the engine's mean length. `step` is the time of a step
of 64 sequences by the wall clock, without the steps in which prompts are computed; `host` is the time that the
host works in it. Then the time to the first token of a prompt of 4160 tokens, 4096 of them in the prefix cache or not,
the host's part of it, and `alone`: the jitted model with the 64 tokens after the cached ones. `ratio` is the tokens per
second of the engine divided by those of the engine with JAX's own operations, both greedy. All outputs are compared
between the rounds before anything is timed.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.bench_model_gpu import config
from benchmarks.harness import add_json, save
from bijax.serving import Engine, EngineOptions, SamplingParams
from flax_layers import Llama, ServedLlama

BATCH: Final = 64
PROMPT: Final = 128
LENGTH: Final = 640
PAGE: Final = 64
CACHED: Final = 4096
ROUNDS: Final = 3

Prompts = list[list[int]]


def draw_prompts(number: int, length: int, vocab_size: int, seed: int = 0) -> Prompts:
    rng = np.random.default_rng(seed)
    prompts: Prompts = rng.integers(0, vocab_size, (number, length)).tolist()
    return prompts


def params(seed: int, tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)


def serve(engine: Engine, prompts: Prompts, temperature: float) -> dict[str, Any]:
    """Serves all prompts; returns their tokens, tokens a second, and µs of a step and of the host's work in it."""
    engine.flush_cache()
    start = time.perf_counter()
    names = [engine.add(p, params(i, LENGTH - PROMPT, temperature)) for i, p in enumerate(prompts)]
    outputs, steps, host = {}, [], []
    while engine.has_work:
        began, cpu = time.perf_counter(), time.thread_time()
        done = engine.step(watched=())
        steps.append(time.perf_counter() - began)
        host.append(time.thread_time() - cpu)
        outputs |= {output.request_id: output.completions[0].tokens for output in done}
    seconds = time.perf_counter() - start
    decoding = slice(len(steps) // 8, -2)
    return {
        "outputs": [outputs[name] for name in names],
        "tokens_per_s": sum(map(len, outputs.values())) / seconds,
        "step_us": statistics.fmean(steps[decoding]) * 1e6,
        "host_us": statistics.fmean(host[decoding]) * 1e6,
    }


def static_us(model: Llama, *, batch: int, tokens: int, start: int, calls: int = 100) -> float:
    """Returns µs of a call of the jitted model alone, from pages, whose most probable tokens go into the next call.

    Args:
        model: The model.
        batch: Sequences.
        tokens: New tokens of each in a call.
        start: Tokens that each has before the first call.
        calls: Number of calls. With one token in a call the sequences grow; else each call takes the same tokens.
    """
    graph, state = nnx.split(model)
    each = -(-(start + max(tokens, calls)) // PAGE)
    table = np.random.default_rng(0).permutation(batch * each).reshape(batch, each).astype(np.int32)
    cache = model.paged_cache(table, num_pages=batch * each, page_size=PAGE)
    cache = replace(cache, lengths=jnp.full(batch, start, jnp.int32))

    def step(state: Any, last: jax.Array, cache: Any) -> Any:
        logits, new = nnx.merge(graph, state).extend(jnp.broadcast_to(last, (batch, tokens)), cache)
        if tokens > 1:
            new = replace(new, lengths=cache.lengths)
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), new

    last = jnp.zeros((batch, 1), jnp.int32)
    program = jax.jit(step, donate_argnums=2).lower(state, last, cache).compile()
    for _ in range(3):
        last, cache = program(state, last, cache)
    jax.block_until_ready(last)
    begin = time.perf_counter()
    for _ in range(calls - 3):
        last, cache = program(state, last, cache)
    jax.block_until_ready(last)
    return round((time.perf_counter() - begin) / (calls - 3) * 1e6, 1)


def static_step_us(model: Llama) -> float:
    """Returns µs of a decoding step of the model alone at the mean length of the engine's sequences."""
    return static_us(model, batch=BATCH, tokens=1, start=(PROMPT + LENGTH - 100) // 2)


def engines_cell(model: Llama) -> dict[str, Any]:
    served = ServedLlama(model)
    options = EngineOptions(
        max_running=BATCH,
        max_prefill_tokens=BATCH * PROMPT,
        num_pages=BATCH * (LENGTH // PAGE) + 1,
        page_size=PAGE,
        max_length=LENGTH,
    )
    ways = {
        "bijax": Engine(served, options=options),
        "plain": Engine(served, options=replace(options, enable_deterministic_inference=False)),
    }
    prompts = draw_prompts(BATCH, PROMPT, served.vocab_size)
    alone: dict[str, Any] = {}
    for name, engine in ways.items():
        start = time.perf_counter()
        alone[name] = serve(engine, prompts, 1.0)["outputs"]
        print(f"{name}: first round {time.perf_counter() - start:.1f} s", flush=True)
    found: dict[str, Any] = {name: {} for name in ways}
    for temperature, kind in ((0.0, "greedy"), (1.0, "sampled")):
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, engine in ways.items():
                rounds[name].append(serve(engine, prompts, temperature))
        for name, results in rounds.items():
            same = all(r["outputs"] == results[0]["outputs"] for r in results)
            if name == "bijax" and not (same and (kind == "greedy" or results[0]["outputs"] == alone[name])):
                raise RuntimeError("the engine gave other tokens in another round; nothing is timed")
            found[name][kind] = {
                "tokens_per_s": round(max(r["tokens_per_s"] for r in results)),
                "step_us": round(min(r["step_us"] for r in results), 1),
                "host_us": round(min(r["host_us"] for r in results), 1),
            }
    return found


def prefix_cell(model: Llama) -> dict[str, float]:
    """Returns ms to the first token of a prompt: one that the prefix cache holds but for 64 tokens, and a new one."""
    length = CACHED + PAGE
    engine = Engine(
        ServedLlama(model),
        options=EngineOptions(
            max_running=1,
            max_prefill_tokens=CACHED,
            num_pages=4 * length // PAGE,
            page_size=PAGE,
            max_length=length + PAGE,
        ),
    )
    [whole] = draw_prompts(1, length, model.config.vocab_size)
    ends = draw_prompts(ROUNDS + 2, PAGE, model.config.vocab_size, seed=1)
    times: dict[str, list[float]] = {"miss": [], "hit": []}
    host: dict[str, list[float]] = {"miss": [], "hit": []}
    answers = []
    for end in ends:
        engine.flush_cache()
        for kind in ("miss", "hit"):
            if kind == "hit":  # another end: the start alone is known
                engine.flush_cache()
                engine.generate([whole], params(0, 1, 0.0))
            start, used = time.perf_counter(), time.thread_time()
            [output] = engine.generate([whole[:CACHED] + end], params(0, 1, 0.0))
            times[kind].append(time.perf_counter() - start)
            host[kind].append(time.thread_time() - used)
            answers.append((output.cached_tokens, output.completions[0].tokens))
    if {a[0] for a in answers[::2]} != {0} or {a[0] for a in answers[1::2]} != {CACHED}:
        raise RuntimeError(f"expected 0 and {CACHED} cached tokens in turn, got {[a[0] for a in answers]}")
    if [a[1] for a in answers[::2]] != [a[1] for a in answers[1::2]]:
        raise RuntimeError("a hit gave another token than a miss")
    miss, hit = (min(times[kind][1:]) * 1e3 for kind in ("miss", "hit"))
    return {
        "miss_ms": round(miss, 3),
        "hit_ms": round(hit, 3),
        "hit_host_ms": round(min(host["hit"][1:]) * 1e3, 3),
        "alone_ms": round(static_us(model, batch=1, tokens=PAGE, start=CACHED) / 1e3, 3),
        "miss_over_hit": round(miss / hit, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine on a GPU.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    add_json(parser)
    arguments = parser.parse_args()
    cells = []
    for layers in arguments.layers:
        model = Llama(config(layers, CACHED + 2 * PAGE), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        cell: dict[str, Any] = {"layers": layers, "batch": BATCH, "prompt": PROMPT, "length": LENGTH}
        cells.append(cell)
        for name, measure in (("engine", engines_cell), ("static_step_us", static_step_us), ("prefix", prefix_cell)):
            start = time.perf_counter()
            cell[name] = measure(model)
            print(f"{layers} layers: {name} {cell[name]} ({time.perf_counter() - start:.1f} s)", flush=True)
        rates = [cell["engine"][name]["greedy"]["tokens_per_s"] for name in ("bijax", "plain")]
        cell["ratio"] = round(rates[0] / rates[1], 3)
        save("engine", cells, arguments.json)


if __name__ == "__main__":
    main()
