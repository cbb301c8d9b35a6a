"""Figures of programs on a CPU."""

from benchmarks.tables.figures import Figures, of, on_gpu, paragraph, span, table
from benchmarks.tables.gpu import compile_range


def _compiling(figures: Figures, cache: str, model: str) -> str:
    """Returns "1.6 and 2.2": our wall time over plain JAX's, of the forward pass and of the gradient."""
    times = (1 / figures.one(model=model, case=case, cache=cache)["ratio"] for case in ("forward", "gradient"))
    return " and ".join(f"{time:.1f}" for time in times)


def _steps(figures: Figures) -> str:
    found = [f"{figures.one(what='decode', batch=batch)['ratio']:.2f} at batch {batch}" for batch in (1, 8, 64)]
    prompt = figures.one(what="prefill", batch=1)["ratio"]
    return f"decoding {', '.join(found)}; a prompt of 64 tokens {prompt:.2f}"


def readme() -> str:
    """The paragraph of README."""
    model, compiling, gpu = of("transform_smollm2", "cpu"), of("compile", "cpu"), on_gpu("compile")
    first = paragraph(
        "On two cores of a CPU with AVX-512, SmolLM2-135M written in plain JAX runs under `bijax.invariant` at these",
        f"fractions of its own speed: {_steps(model)} ({model.source}).",
    )
    second = paragraph(
        "The first call takes longer. On that CPU the whole model as one program and its gradient take",
        f"{_compiling(compiling, 'cold', 'transformed')} times as long to lower and compile as in plain JAX (wall",
        "time), in part because each form of a product is compared with a reference once per process;",
        "a second time in the",
        f"same process {_compiling(compiling, 'again', 'transformed')} times. `flax_layers.Llama` with",
        "the library's own",
        f"operations takes {_compiling(compiling, 'cold', 'own')} times as long, a second time",
        f"{_compiling(compiling, 'again', 'own')} ({compiling.dates}). On an {gpu.device}, a step of the Llama above",
        f"takes {span(compile_range(), '.1f')} times as long as in plain JAX (jax {gpu.jax}, {gpu.dates}).",
    )
    return f"{first}\n\n{second}"


def matmul() -> str:
    """Matmul by shape and number of rows."""
    figures = of("matmul_f32", "cpu")
    shapes = dict.fromkeys((c["k"], c["n"], c["transpose_w"]) for c in figures.cells)
    rows = sorted(set(figures.column("m")))
    lines = []
    for k, n, transpose_w in shapes:
        found = [figures.one(m=m, k=k, n=n, transpose_w=transpose_w)["ratio"] for m in rows]
        lines.append([f"{k} → {n}{', weights (N, K)' if transpose_w else ''}", *(f"{ratio:.2f}" for ratio in found)])
    return f"{table(['matmul, float32, rows:', *map(str, rows)], lines)}\n\n*{figures.source}, {figures.commits}.*"


def models() -> str:
    """Decoding with the library's own operations, and the transformed model."""
    own, model = of("decode_smollm2", "cpu"), of("transform_smollm2", "cpu")
    speeds = ", ".join(f"{c['ratio']:.2f} (batch {c['batch']})" for c in own.cells)
    memory = max(own.column("peak_memory_ratio"))
    unclean = "" if all(part["clean"] for part in own.parts) else ", measured with uncommitted changes"
    return paragraph(
        "SmolLM2-135M in float32 with the library's own operations, against the same model in plain JAX: decoding runs",
        f"at {speeds} of its speed, with up to {memory:.2f} of its peak memory ({own.dates}{unclean}). The model",
        f"written in plain JAX, under `bijax.invariant`, against itself: {_steps(model)}",
        f"({model.dates}, with AVX-512).",
    )


def compiling() -> str:
    """Lowering and compiling SmolLM2 as one program."""
    figures = of("compile", "cpu")
    names = {"transformed": "the plain model under `bijax.invariant`", "own": "the library's own operations"}
    rows = []
    for model, text in names.items():
        for case in ("forward", "gradient"):
            cold, again = (figures.one(model=model, case=case, cache=cache) for cache in ("cold", "again"))
            wall = [
                f"{1 / c['ratio']:.1f} ({c['wall_s']:.1f} s, plain JAX {c['plain_wall_s']:.1f})" for c in (cold, again)
            ]
            processor = ", ".join(f"{1 / c['processor_ratio']:.1f}" for c in (cold, again))
            rows.append([f"{case}, {text}", *wall, processor])
    head = ["over plain JAX", "wall time, new process", "wall time, again", "processor time, new and again"]
    return f"{table(head, rows)}\n\n*{figures.source}.*"
