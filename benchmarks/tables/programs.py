"""Random whole programs whose bits were compared."""

from benchmarks import record
from benchmarks.tables.figures import of, paragraph


def _counts(machine: str) -> tuple[str, str]:
    figures = of("programs", machine)
    own = figures.where(lambda c: c["control"] is None)
    control = figures.where(lambda c: c["control"] == "plain")
    counts = [sum(found.column(name)) for found in (own, control) for name in ("differing", "programs")]
    failed = sum(own.column("failed"))
    none = "none" if counts[0] == 0 else str(counts[0])
    device = f"an {figures.device}" if machine != "cpu" else "a CPU"
    text = f"{none} of {counts[1]} changed a bit on {device}, where {counts[2]} of {counts[3]} did in plain JAX"
    text += f" ({failed} could not be lowered)" if failed else ""
    return text, f"jax {figures.jax}, {figures.dates}, commit {figures.commits}"


def sentence() -> str:
    """The sentence of README and of the limits."""
    machines = [name for name in ("h100", "h200", "cpu") if (record.RESULTS / f"programs_{name}.json").exists()]
    found = [_counts(machine) for machine in machines]
    counts, sources = "; ".join(text for text, _ in found), "; ".join(source for _, source in found)
    return paragraph(
        "The tests include random whole programs (products, loops, transposes, norms, casts; values, gradients and",
        "scans; batches of 1 to 64; float32, bfloat16, float16 and float64). In the last long runs",
        f"{counts} ({sources}).",
    )
