"""Figures of the engine."""

from benchmarks.tables.figures import of, on_gpu, paragraph, span


def gpu() -> str:
    """The engine on a GPU, and drawing tokens."""
    engine, sampling = on_gpu("engine"), on_gpu("sampling")
    large, small = engine.one(layers=16), engine.one(layers=4)
    rates = [large["engine"][name]["greedy"]["tokens_per_s"] for name in ("bijax", "plain")]
    step = large["engine"]["bijax"]["greedy"]["step_us"] / 1e3
    steps = [small["engine"]["bijax"][kind]["step_us"] / 1e3 for kind in ("sampled", "greedy")]
    prefix = large["prefix"]
    greedy, drawn = (
        span(sampling.where(lambda c, t=t: (c["temperature"] > 0) == t).column("of_reading")) for t in (False, True)
    )
    over = span(sampling.where(lambda c: c["temperature"] > 0).column("ratio"), ".1f")
    alone, alone_small = (c["static_step_us"] / 1e3 for c in (large, small))
    head = paragraph(
        "A Llama of the 1B shape (16 layers, bfloat16, random weights), 64 requests of 128 and 512 tokens",
        f"({engine.source}; `benchmarks/bench_engine_gpu.py`):",
    )
    items = (
        [f"{rates[0]} tokens a second, greedy; the same engine with JAX's own operations gives {rates[1]}."],
        [
            f"A step takes {step:.2f} ms, the jitted model alone {alone:.2f} ms. With 4 layers it takes",
            f"{span(steps)} ms and",
            f"{alone_small:.2f} ms, because the host then has more to do than the device.",
        ],
        [
            f"The first token of a prompt of 4160 tokens comes after {prefix['miss_ms']:.1f} ms, with",
            "4096 of them in the",
            f"prefix cache after {prefix['hit_ms']:.1f} ms: {prefix['alone_ms']:.1f} ms in the model,",
            "the rest on the host.",
        ],
        [
            f"Drawing a token from logits of 128256 columns takes {greedy} times as long as reading",
            "them at temperature 0,",
            f"and {drawn} times above; `jax.random.categorical` takes {over} times as long as that ({sampling.source};",
            "`benchmarks/bench_sampling_gpu.py`).",
        ],
    )
    return "\n".join([head, "", *(paragraph(*item, indent="- ") for item in items)])


def cpu() -> str:
    """The engine on a CPU."""
    figures = of("engine_smollm2", "cpu")
    [cell] = figures.cells
    overhead = cell["largest_batch"]["overhead"]
    rate, running = max(cell["tokens_per_s"]["bijax"]), cell["options"]["max_running"]
    return paragraph(
        f"On two cores of a CPU ({figures.source}; `benchmarks/bench_engine.py`) SmolLM2 gives",
        f"{rate:.0f} tokens a second",
        f"to {cell['requests']} requests, {cell['ratio']:.2f} of what JAX's own operations give.",
        "Scheduling and sampling",
        f"take {100 * overhead:.0f} % of a step of {running} sequences.",
    )
