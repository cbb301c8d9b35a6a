"""Figures of several GPUs."""

from benchmarks.tables.figures import Figures, of, on_gpu, paragraph, table


def steps() -> str:
    """Steps of models over two GPUs, against one of them and against JAX's own operations."""
    figures = _steps_of_two()
    head = paragraph(
        "Queued steps of models of Llama's shapes (4 layers of 1B, 2 of 8B, a vocabulary of 8192, bfloat16; wall time,",
        f"{figures.source}; `benchmarks/bench_parallel_gpu.py`). A quotient above 1 means that the first is faster:",
    )
    rows = [
        [
            f"{c['shape']}, {c['case'].replace('x', '×')}",
            Figures([c], [part]).device,
            f"{c['ours_us'] / 1e3:.2f} ms",
            f"{c['xla_us'] / c['ours_us']:.2f}",
            f"{c['one_us'] / c['ours_us']:.2f}",
            f"{c['chain_us'] / c['one_us']:.2f}",
        ]
        for c, part in zip(figures.cells, figures.parts, strict=True)
    ]
    names = (
        "step",
        "GPUs",
        "two GPUs",
        "two, against JAX's on two",
        "two, against one",
        "one, against sums that are not cut",
    )
    return "\n".join([head, "", table(names, rows, "llrrrr")])


def _steps_of_two() -> Figures:
    """Returns the steps over two GPUs on an H200, and on an H100 those that were measured there alone."""
    newer, older = (
        of("parallel", gpu).where(lambda c: (c["what"], c["devices"]) == ("steps", 2)) for gpu in ("h200", "h100")
    )
    known = {(c["shape"], c["case"]) for c in newer.cells}
    rest = older.where(lambda c: (c["shape"], c["case"]) not in known)
    return Figures([*newer.cells, *rest.cells], [*newer.parts, *rest.parts])


def overlap() -> str:
    """Steps of a model with experts over two GPUs, with and without overlap."""
    figures = on_gpu("overlap")
    head = paragraph(
        "Steps of all blocks of a model with the width of Qwen3-30B-A3B (two layers, heads and experts over two GPUs,",
        f"bfloat16; queued, wall time, {figures.source}; `benchmarks/bench_overlap_gpu.py`). The quotient is the time",
        'without overlap divided by the time with it; "early" are two options of XLA that start collectives early:',
    )
    rows = [
        [
            c["case"].replace("x", "×"),
            c["program"].replace("_", " "),
            f"{c['ours_us'] / 1e3:.2f} ms",
            f"{c['ratio']:.2f}",
            str(c["differing"]),
        ]
        for c in figures.cells
    ]
    return "\n".join(
        [head, "", table(("step", "overlap", "time", "quotient", "elements that differ in bits"), rows, "llrrr")]
    )
