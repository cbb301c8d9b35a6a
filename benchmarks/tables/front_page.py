"""The numbers of the site's front page, and a sentence of README on GPUs without kernels of their own."""

from benchmarks import record
from benchmarks.tables.demo import INVARIANT, PLAIN
from benchmarks.tables.figures import of, paragraph, span
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


def other_gpus() -> str:
    """What serves on GPUs but Hopper, and how fast a model is with it on a Hopper GPU, where alone it was run."""
    figures = of("model_bf16_jax_triton", "h100").where(lambda c: c["model"] == "own" and c["layers"] == 4)
    decoding, prefill, training = (
        span(figures.where(lambda c, what=what: c["case"].startswith(what)).column("ratio"))  # type: ignore[misc]
        for what in ("decode", "prefill", "train")
    )
    return paragraph(
        "All GPU figures above are for the Hopper kernels. Other NVIDIA GPUs from Ampere on run Triton kernels",
        "through jax-triton, which were compiled for these cards but have only been run on a Hopper GPU. There a Llama",
        f"of the 1B shape decodes through them at {decoding} of plain JAX's speed, prefills at {prefill} and trains at",
        f"{training} ({figures.source}; [table](docs/guide/gpu.md)).",
    )
