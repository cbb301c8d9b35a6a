"""Ratios on a GPU: the table of `docs/guide/gpu.md`, and the rows of it that README shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.tables.figures import Figures, count, mean, on_gpu, ratios, table

GRADIENTS: Final = ("rms_norm_gradient", "cross_entropy_gradient")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        text: What is compared with what.
        benchmark: Whose cells are taken.
        condition: Which of them.
        worst: Describes the cell with the least ratio.
        above: The time of the other side.
        below: Our time.
    """

    text: str
    benchmark: str
    condition: Callable[[dict[str, Any]], bool] = lambda _: True
    worst: Callable[[dict[str, Any]], str] | None = None
    above: str = "xla_us"
    below: str = "ours_us"

    @property
    def figures(self) -> Figures:
        """The cells that are compared."""
        return on_gpu(self.benchmark).where(lambda c: self.condition(c) and self.above in c and self.below in c)

    @property
    def ratios(self) -> list[float]:
        """The ratios of the cells."""
        return ratios(self.figures, self.above, self.below)


def shape(cell: dict[str, Any]) -> str:
    return f"{cell['k']} → {cell['n']}, {count(cell['m'], 'row')}"


def row_of(cell: dict[str, Any]) -> str:
    return f"{cell['op']} of {cell['columns']} columns, {count(cell['rows'], 'row')}, {cell['dtype']}"


def heads(cell: dict[str, Any]) -> str:
    batch = f"batch {cell['batch']}, " if cell["what"] == "decode" else ""
    full = {"full": ", full", "causal": ", causal"}.get(cell["what"].split()[0], "")
    return f"heads of {cell['size']}, {batch}{cell['keys']} keys{full}"


def case(cell: dict[str, Any]) -> str:
    kind, _, size = cell["case"].partition(" ")
    return f"{kind} {size.replace('x', '×')}"


def model(name: str | tuple[str, ...], layers: int, *kinds: str) -> Callable[[dict[str, Any]], bool]:
    names = (name,) if isinstance(name, str) else name
    return lambda c: c["model"] in names and c["layers"] == layers and c["case"].startswith(kinds or "")


def kind(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda c: c["what"] in names


def float32(precision: str) -> Callable[[dict[str, Any]], bool]:
    return lambda c: c["precision"] == precision


def stored(cell: dict[str, Any]) -> str:
    return f"weights {'(N, K)' if cell['transpose_w'] else '(K, N)'}, {shape(cell)}"


STEPS: Final = ("decode", "prefill")
TRAINING: Final = ("gradient 4x2048", "train 4x2048")
LLAMAS: Final = ("own", "transformed_cudnn", "transformed")

ROWS: Final = {
    "matmul": Row("matmul, bfloat16, 15 shapes of weights, 1 to 8192 rows", "matmul_bf16", worst=shape),
    "split_k": Row(
        '8192 → 1280 and 4096 → 1024 with `split_k="auto"`, 1 to 128 rows',
        "fused_bf16",
        lambda c: c["case"] == "shards",
        shape,
    ),
    "matmul_f16": Row("matmul, float16", "matmul_f16", worst=shape),
    "fused": Row(
        "bias, activations, residuals, gated products",
        "fused_bf16",
        lambda c: c["case"] != "shards",
        lambda c: f"{c['case']}, {shape(c)}",
    ),
    "linear": Row("a linear layer with its gradients, stacks of products", "linear_bf16"),
    "tf32": Row("matmul, float32, default precision (TF32)", "matmul_f32", float32("default"), stored),
    "float32": Row('matmul, float32, `precision="highest"`', "matmul_f32", float32("highest"), stored),
    "rows": Row(
        "norms, softmax, log-softmax, mean, cross entropy, 1 to 16384 rows of 576 to 128256",
        "rows",
        lambda c: c["op"] not in GRADIENTS,
        row_of,
    ),
    "cross_entropy": Row(
        "cross entropy with its gradient", "rows", lambda c: c["op"] == "cross_entropy_gradient"
    ),
    "rms_norm": Row("RMSNorm with its gradients", "rows", lambda c: c["op"] == "rms_norm_gradient"),
    "prefill": Row(
        "attention, bfloat16, prefill of 1024 to 32768 keys, heads of 64 and 128, against cuDNN",
        "attention_bf16",
        kind("causal", "full"),
        heads,
    ),
    "gradients": Row(
        "the same with gradients, 1024 to 16384 keys",
        "attention_bf16",
        kind("causal with gradients", "full with gradients"),
        heads,
    ),
    "deterministic": Row(
        "the same with gradients, against cuDNN with `xla_gpu_deterministic_ops`",
        "attention_bf16",
        kind("causal with gradients", "full with gradients"),
        heads,
        "deterministic_us",
    ),
    "decode": Row(
        "attention, bfloat16, decoding, batches of 1 to 128, 2048 to 131072 keys, against cuDNN",
        "attention_bf16",
        kind("decode"),
        heads,
    ),
    "one_split": Row(
        "prefill of 4096 keys and more, against our own without the splits that decoding needs",
        "attention_bf16",
        kind("causal", "full"),
        heads,
        "one_split_us",
    ),
    "int8": Row(
        "decoding from int8 caches, against our own from bfloat16 caches, heads of 128",
        "attention_bf16",
        lambda c: c["size"] == 128,
        heads,
        "ours_us",
        "int8_us",
    ),
    "int8_64": Row(
        "the same, heads of 64", "attention_bf16", lambda c: c["size"] == 64, heads, "ours_us", "int8_us"
    ),
    "engine_rows": Row(
        "quantisation, norms, rotary embedding, routing and copies of rows of an engine, 2048 and 8192 rows, against"
        " XLA's fused programs",
        "engine_rows",
        lambda c: c["tokens"] >= 2048,
        lambda c: f"`{c['operator']}`, {c['tokens']} rows",
    ),
    "engine_rows_few": Row(
        "the same, 8 rows", "engine_rows", lambda c: c["tokens"] == 8, lambda c: f"`{c['operator']}`"
    ),
    "experts": Row(
        "a mixture-of-experts layer (Qwen3-MoE, DeepSeek-V3), 1 to 8192 tokens, against the fastest of three forms in"
        " plain JAX",
        "moe_layer",
        worst=lambda c: f"{c['layer']}, {c['tokens']} tokens",
    ),
    "llama": Row(
        "`flax_layers.Llama` (1B shape, 4 layers, bfloat16), decoding and prefill, wall time, against the same model in"
        " plain JAX with XLA's or cuDNN's attention, whichever is faster",
        "model_bf16",
        model("own", 4, *STEPS),
        case,
    ),
    "llama_cudnn": Row(
        "the plain model with cuDNN's attention under `bijax.invariant`, the same steps, against the faster plain one",
        "model_bf16",
        model("transformed_cudnn", 4, *STEPS),
        case,
    ),
    "llama_xla": Row(
        "the plain model with XLA's attention under `bijax.invariant`, the same steps, against itself",
        "model_bf16",
        model("transformed", 4, *STEPS),
        case,
    ),
    "llama_16": Row(
        "the first two with 16 layers: decoding, prefill of 4×2048 tokens, a training step",
        "model_bf16",
        model(LLAMAS[:2], 16),
        case,
    ),
    "training": Row(
        "gradients and training steps of 4×2048 tokens (remat, adamw), these three models",
        "model_bf16",
        model(LLAMAS, 4, *TRAINING),
        lambda c: f"{c['model']}, {case(c)}" + (f", weights in {c['params']}" if "params" in c else ""),
    ),
    "accumulate": Row(
        "`accumulate_gradients`, 16×2048 tokens in units of 4, the first two models",
        "model_bf16",
        model(LLAMAS, 4, "accumulate"),
    ),
    "flax": Row(
        "a model of Flax's own layers, converted, against itself: prefill and gradient, XLA's attention",
        "model_bf16",
        model("drop_in", 4),
        case,
    ),
    "flax_cudnn": Row("the same with cuDNN's attention", "model_bf16", model("drop_in_cudnn", 4), case),
    "loss": Row(
        "`linear_cross_entropy` with its gradients against logits in JAX, 2048 to 16384 rows", "loss_bf16",
        above="plain_us", below="fused_us",
    ),
    "matmul_jax_triton": Row(
        "kernels for other GPUs, through jax-triton: matmul, bfloat16, 15 shapes of weights",
        "matmul_bf16_jax_triton",
        worst=shape,
    ),
    "rows_jax_triton": Row(
        "the same: norms, softmax, log-softmax, mean, cross entropy",
        "rows_jax_triton",
        lambda c: c["op"] not in GRADIENTS,
        row_of,
    ),
    "row_gradients_jax_triton": Row(
        "the same: cross entropy and RMSNorm with gradients",
        "rows_jax_triton",
        lambda c: c["op"] in GRADIENTS,
        row_of,
    ),
    "prefill_jax_triton": Row(
        "the same: attention, bfloat16, prefill, against cuDNN",
        "attention_bf16_jax_triton",
        kind("causal", "full"),
        heads,
    ),
    "gradients_jax_triton": Row(
        "the same: attention with gradients",
        "attention_bf16_jax_triton",
        kind("causal with gradients", "full with gradients"),
        heads,
    ),
    "decode_jax_triton": Row(
        "the same: attention, decoding", "attention_bf16_jax_triton", kind("decode"), heads
    ),
    "llama_jax_triton": Row(
        "the same: `flax_layers.Llama` (1B shape, 4 layers), decoding and prefill, wall time",
        "model_bf16_jax_triton",
        model("own", 4, *STEPS),
        case,
    ),
    "training_jax_triton": Row(
        "the same: its gradient and a training step",
        "model_bf16_jax_triton",
        model("own", 4, "gradient", "train"),
        case,
    ),
    "hybrid": Row(
        "`flax_layers.Llama` with linear attention (four layers of Qwen3-Next's shape), decoding, wall time",
        "hybrid_bf16",
        model("own", 4, "decode"),
        case,
    ),
    "elementwise": Row(
        "chains of 1 to 20 element-wise operations under `bijax.invariant`, 1 to 256 MiB, float32 and bfloat16",
        "elementwise",
        worst=lambda c: f"{c['operations']} {c['op']}",
    ),
}  # fmt: skip

README: Final = (
    *("llama", "llama_cudnn", "llama_xla", "training", "experts", "matmul", "rows", "prefill", "decode", "int8"),
    "gradients",
)


def short() -> str:
    """The table of README."""
    rows = []
    for name in README:
        row = ROWS[name]
        found, text = row.ratios, row.text
        numbers = [f"{mean(found):.2f}", f"{min(found):.2f}"]
        if name == "gradients":
            other = ROWS["deterministic"].ratios
            text = "attention, bfloat16, prefill with gradients, against cuDNN (against its deterministic form)"
            numbers = [f"{numbers[0]} ({mean(other):.2f})", f"{numbers[1]} ({min(other):.2f})"]
        rows.append([f"{row.figures.device}: {text}", *numbers, row.figures.dates])
    return table(["", "geometric mean", "worst", "measured"], rows)


def whole() -> str:
    """The table of `docs/guide/gpu.md`."""
    rows = []
    for row in ROWS.values():
        figures, found = row.figures, row.ratios
        least = figures.cells[found.index(min(found))]
        worst = f"{min(found):.2f}" + (f" ({row.worst(least)})" if row.worst else "")
        rows.append(
            [
                row.text,
                figures.device,
                str(len(found)),
                f"{mean(found):.2f}",
                worst,
                f"{figures.dates}: {figures.commits}",
            ]
        )
    return table(["", "GPU", "cells", "geometric mean", "worst", "measured at"], rows)


def compiling() -> str:
    """Seconds of lowering and compiling a step in a new process."""
    figures = on_gpu("compile")
    texts = {
        "prefill:1x2048": "prefill of 2048 tokens",
        "decode:8x2048": "decoding 8 sequences",
        "gradient:2x512": "gradient of 2×512 tokens",
    }
    rows = []
    for name, text in texts.items():
        own, transformed = (figures.one(case=name, model=m, cache="cold") for m in ("own", "transformed"))
        plain = f"{own['plain_lower_s']:.1f} + {own['plain_compile_s']:.1f}"
        rows.append([text, plain, *(f"{c['lower_s']:.1f} + {c['compile_s']:.1f}" for c in (own, transformed))])
    names = ["", "plain JAX", "our model", "the plain model under `bijax.invariant`"]
    return f"{table(names, rows)}\n\n*{figures.source}.*"


def compile_range() -> Sequence[float]:
    """Our seconds over plain JAX's, in new processes."""
    return sorted(1 / cell["ratio"] for cell in on_gpu("compile").cells if cell["cache"] == "cold")
