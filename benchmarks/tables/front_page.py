"""The numbers of the site's front page."""

from benchmarks import record
from benchmarks.tables.demo import INVARIANT, PLAIN
from benchmarks.tables.figures import of
from benchmarks.tables.gpu import ROWS, mean


def numbers() -> str:
    """Three numbers, each a container of the page: texts, random programs, speed."""
    demo = of("demo", "cpu")
    plain, ours = (demo.one(what="total", side=side) for side in (PLAIN, INVARIANT))
    machines = [name for name in ("h100", "h200", "cpu") if (record.RESULTS / f"programs_{name}.json").exists()]
    programs = [cell for name in machines for cell in of("programs", name).cells]
    own, control = ([c for c in programs if c["control"] == what] for what in (None, "plain"))
    speed = ROWS["llama"]
    cards = [
        (
            f"{ours['texts_differing']} of {ours['texts']}",
            f"texts change when a language model answers in batches; plain JAX: {plain['texts_differing']}",
        ),
        (
            f"{sum(c['differing'] for c in own)} of {sum(c['programs'] for c in own)}",
            "random programs change a bit; plain JAX: "
            f"{sum(c['differing'] for c in control)} of {sum(c['programs'] for c in control)}",
        ),
        (f"{mean(speed.ratios):.2f} ×", f"the speed of plain JAX, a Llama model on an {speed.figures.device}"),
    ]
    return "\n".join(
        [
            "::::{container} numbers",
            *(f":::{{container}}\n**{number}**\n\n{text}\n:::" for number, text in cards),
            "::::",
        ]
    )
