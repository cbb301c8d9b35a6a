"""Figures of several GPUs."""

from benchmarks.tables.figures import on_gpu, paragraph, table


def steps() -> str:
    """Steps of models over two GPUs, against one of them and against JAX's own operations."""
    figures = on_gpu("parallel").where(lambda c: c["what"] == "steps")
    head = paragraph(
        "Queued steps of models of Llama's shapes (4 layers of 1B, 2 of 8B, a vocabulary of 8192, bfloat16; wall time,",
        f"{figures.source}; `benchmarks/bench_parallel_gpu.py`). A quotient above 1 means that the first is faster:",
    )
    rows = [
        [
            f"{c['shape']}, {c['case'].replace('x', '×')}",
            f"{c['ours_us'] / 1e3:.2f} ms",
            f"{c['xla_us'] / c['ours_us']:.2f}",
            f"{c['one_us'] / c['ours_us']:.2f}",
            f"{c['chain_us'] / c['one_us']:.2f}",
        ]
        for c in figures.cells
    ]
    names = ("step", "two GPUs", "two, against JAX's on two", "two, against one", "one, against sums that are not cut")
    return "\n".join([head, "", table(names, rows, "lrrrr")])
