"""The demo from its arguments to its exit code."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from bijax.demo.arguments import Arguments
from bijax.demo.compute import SideResult, compute_side
from bijax.demo.errors import DemoError
from bijax.demo.figures_json import as_json, device_name
from bijax.demo.model import open_models, open_quantized_models
from bijax.demo.picture import draw_picture
from bijax.demo.progress import ProgressDisplay
from bijax.demo.quality import Quality, quality_lines
from bijax.demo.report import closing_line, print_table, text_lines
from bijax.demo.ways import alone, other_ways
from flax_layers.checkpoint import Checkpoint, CheckpointError, Tokenizer, load_checkpoint, smollm2_path
from pallas_kernels.errors import UnsupportedError

PLAIN, INVARIANT = "plain JAX", "bijax"
LOG_WIDTH = 100


def run_demo(arguments: Arguments) -> int:
    """Runs the demo and prints its findings.

    Returns:
        0 if bijax showed no difference, 1 if it showed one.

    Raises:
        DemoError: If the comparison cannot be made.
    """
    _check_writable("--picture", arguments.picture)
    if arguments.json is not None:
        _check_writable("--json", arguments.json)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, LOG_WIDTH))

    model, checkpoint, tokenizer = _open_checkpoint(arguments.model)
    prompts = _encode(checkpoint, tokenizer, arguments)
    kind = "texts" if arguments.text else "chat prompts"
    console.print(
        f"{model} on {device_name()}, jax {jax.__version__}: {len(prompts)} {kind}, "
        f"up to {arguments.tokens} tokens each, greedy{f', {arguments.quantize}' if arguments.quantize else ''}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    sides, quality = _compute(console, checkpoint, tokenizer, prompts, arguments)

    def decode(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens.tolist())

    print_table(console, sides)
    lines = [line for side in sides for line in text_lines(side, arguments.prompts, decode)]
    if quality is not None:
        lines.extend(quality_lines(quality, decode))
    if arguments.json is not None:
        figures = as_json(
            sides,
            model=model,
            arguments=arguments.figures(),
            prompts=arguments.prompts,
            prompt_tokens=list(map(len, prompts)),
            quality=quality,
            decode=decode,
        )
        _write_json(arguments.json, figures)
        lines.append(f"Figures: {arguments.json}")
    subtitle = f"{model} on {device_name()}, jax {jax.__version__}, greedy, {arguments.quantize or 'float32'}"
    try:
        draw_picture(arguments.picture, sides, tokens_per_text=arguments.tokens, subtitle=subtitle)
    except OSError as error:
        raise DemoError(f"cannot save the picture: {error}") from error
    lines.append(f"Picture: {arguments.picture}")
    for line in (*lines, closing_line(sides[::-1])):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if sides[-1].total.identical else 1


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
                models = open_models(checkpoint, max_new_tokens=arguments.tokens)
            else:
                models, quality = open_quantized_models(
                    checkpoint, tokenizer, prompts[0], max_new_tokens=arguments.tokens
                )
            for side, generate in zip((PLAIN, INVARIANT), models, strict=True):
                result = compute_side(
                    side, generate, prompts, reference, others, max_new_tokens=arguments.tokens, watcher=display
                )
                sides.append(result)
        except (CheckpointError, UnsupportedError) as error:
            raise DemoError(str(error)) from error
    return sides, quality


def _check_writable(option: str, path: Path) -> None:
    # Before the work, which takes minutes.
    if path.is_dir() or not path.parent.is_dir():
        raise DemoError(f"{option} must be a file in an existing folder, got {str(path)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoError(f"{option}: no permission to write {str(path)!r}; choose another place")


def _write_json(path: Path, figures: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot write the figures: {error}") from error
