"""The measurement of the demo, from its arguments to its results."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from bijax.demo.arguments import Arguments
from bijax.demo.compute import SideResult, compute_side
from bijax.demo.errors import DemoError
from bijax.demo.example import Example, examples
from bijax.demo.model import open_models, open_quantized_models
from bijax.demo.progress import ProgressDisplay
from bijax.demo.quality import Quality
from bijax.demo.ways import alone, other_ways
from flax_layers.checkpoint import Checkpoint, CheckpointError, Tokenizer, load_checkpoint, smollm2_path
from pallas_kernels.errors import UnsupportedError

PLAIN, INVARIANT = "plain JAX", "bijax"
MOST_EXAMPLES = 2


@dataclasses.dataclass(frozen=True)
class Demo:
    """What a run has found.

    Attributes:
        arguments: The arguments of the run.
        model: Name of the checkpoint.
        device: Name of the device, as JAX says it: "cpu", "NVIDIA H200".
        prompt_tokens: Lengths of the prompts, with the chat template around them.
        sides: Plain JAX and bijax, in this order.
        examples: Prompts whose text changes.
        quality: Before and after quantisation; None for a model that is not quantised.
        tokenizer: Turns token ids into text.
    """

    arguments: Arguments
    model: str
    device: str
    prompt_tokens: tuple[int, ...]
    sides: tuple[SideResult, ...]
    examples: tuple[Example, ...]
    quality: tuple[Quality, Quality] | None
    tokenizer: Tokenizer

    def decode(self, tokens: np.ndarray) -> str:
        """Turns token ids into text."""
        return self.tokenizer.decode(tokens.tolist())


def measure(console: Console, arguments: Arguments) -> Demo:
    """Generates all texts, and shows on the console how far it has come.

    Raises:
        DemoError: If the comparison cannot be made.
    """
    model, checkpoint, tokenizer = _open_checkpoint(arguments.model)
    if arguments.dtype == "auto":
        arguments = dataclasses.replace(arguments, dtype=checkpoint.dtype)
    prompts = _encode(checkpoint, tokenizer, arguments)
    device = str(jax.devices()[0].device_kind)
    kind = "texts" if arguments.text else "chat prompts"
    console.print(
        f"{model} on {device}, jax {jax.__version__}: {len(prompts)} {kind}, up to {arguments.tokens} tokens each, "
        f"greedy, {precision(arguments)}; seconds include compiling",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    sides, quality = _compute(console, checkpoint, tokenizer, prompts, arguments)
    found = examples(sides, arguments.prompts, lambda tokens: tokenizer.decode(tokens.tolist()), most=MOST_EXAMPLES)
    return Demo(arguments, model, device, tuple(map(len, prompts)), tuple(sides), tuple(found), quality, tokenizer)


def precision(arguments: Arguments) -> str:
    """Names the dtype of the computation, and of the weights if they are quantised."""
    return arguments.dtype + (f" with {arguments.quantize} layers" if arguments.quantize else "")


def _open_checkpoint(path: Path | None) -> tuple[str, Checkpoint, Tokenizer]:
    try:
        path = smollm2_path() if path is None else path
        checkpoint = load_checkpoint(path)
    except (CheckpointError, OSError) as error:
        raise DemoError(str(error)) from error
    if checkpoint.tokenizer is None:
        raise DemoError(f"{path} has no tokenizer, which the demo needs for its prompts; put a tokenizer.json there")
    return path.resolve().name, checkpoint, checkpoint.tokenizer


def _encode(checkpoint: Checkpoint, tokenizer: Tokenizer, arguments: Arguments) -> list[list[int]]:
    if not arguments.text and not tokenizer.has_chat_template:
        raise DemoError(
            "the checkpoint has no chat template, as base models have none; run with --text to continue the prompts as"
            " they stand"
        )
    longest = checkpoint.config.max_position_embeddings
    encoded = []
    for number, text in enumerate(arguments.prompts, 1):
        try:
            if arguments.text:
                tokens = tokenizer.encode(text)
            else:
                tokens = tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        except ValueError as error:
            raise DemoError(f"prompt {number} ({text!r}): {error}") from error
        if len(tokens) + arguments.tokens > longest:
            raise DemoError(
                f"prompt {number} has {len(tokens)} tokens; with --tokens {arguments.tokens} it must not pass "
                f"{longest}, the longest sequence of this model: take a shorter prompt or fewer tokens"
            )
        encoded.append(tokens)
    return encoded


def _compute(
    console: Console,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    arguments: Arguments,
) -> tuple[list[SideResult], tuple[Quality, Quality] | None]:
    reference = alone(len(prompts))
    others = other_ways(len(prompts), seed=arguments.seed, quick=arguments.quick)
    texts = sum(way.num_texts for way in (reference, *others))
    sides = []
    with ProgressDisplay(console, 2 * texts * arguments.tokens) as display:
        display.begin(PLAIN, "loading the weights")
        try:
            quality = None
            if arguments.quantize is None:
                models = open_models(checkpoint, dtype=arguments.dtype, max_new_tokens=arguments.tokens)
            else:
                models, quality = open_quantized_models(
                    checkpoint, tokenizer, prompts[0], dtype=arguments.dtype, max_new_tokens=arguments.tokens
                )
            for side, generate in zip((PLAIN, INVARIANT), models, strict=True):
                result = compute_side(
                    side, generate, prompts, reference, others, max_new_tokens=arguments.tokens, watcher=display
                )
                sides.append(result)
        except (CheckpointError, UnsupportedError) as error:
            raise DemoError(str(error)) from error
    return sides, quality
