"""Figures of models with linear attention."""

from benchmarks.tables.figures import on_gpu, paragraph, table


def steps() -> str:
    """Steps of a model of Qwen3-Next's layers, against the same model in plain JAX."""
    figures = on_gpu("hybrid_bf16")
    head = paragraph(
        "Steps of a model of four layers with Qwen3-Next's sizes, three of them with linear attention, 16 experts of",
        f"which a token takes 10 (bfloat16; wall time, {figures.source}; `benchmarks/bench_hybrid_gpu.py`). A step of",
        "decoding is timed by itself, and in a row with others, where the host works ahead. A quotient above 1 means",
        "that ours is faster:",
    )
    rows = []
    for cell in figures.cells:
        kind, _, size = cell["case"].partition(" ")
        row = [f"{cell['ours_us'] / 1e3:.2f} ms", f"{cell['ratio']:.2f}"]
        row += [f"{cell['queued_us'] / 1e3:.2f} ms", f"{cell['queued_ratio']:.2f}"] if "queued_us" in cell else ["", ""]
        rows.append([f"{kind} {size.replace('x', '×')}", *row])
    names = ("step", "ours", "against plain JAX", "ours, in a row", "against plain JAX, in a row")
    return "\n".join([head, "", table(names, rows, "lrrrr")])
