"""Runs the modes and prints what they found."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bijax.determinism.command import MODES, TOY, DeterminismError
from bijax.determinism.modes import MODES as RUNNERS
from bijax.determinism.modes import Run, Samples
from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.serving.model import Model
from bijax.serving.toy import ToyModel

_SENTENCE = "Tell me about batch invariance, and why the same request should always get the same answer. "


@dataclasses.dataclass
class Source:
    """Where models come from.

    Attributes:
        path: A checkpoint; None for SmolLM2, "toy" for a toy model.
        tokenizer: Of the checkpoint, once a model was read; None for a toy model.
    """

    path: str | None
    tokenizer: Any = None

    def read(self) -> Model:
        """Reads the model.

        Raises:
            DeterminismError: If it cannot be read.
        """
        if self.path == TOY:
            return ToyModel.random(seed=0)
        from flax_layers.checkpoint import CheckpointError, load_checkpoint, smollm2_path
        from flax_layers.models import Llama, ServedLlama

        try:
            checkpoint = load_checkpoint(smollm2_path() if self.path is None else Path(self.path))
            self.tokenizer = checkpoint.tokenizer
            return ServedLlama(Llama.from_checkpoint(checkpoint))
        except (CheckpointError, OSError) as error:
            raise DeterminismError(str(error)) from error

    def prompt(self, length: int, vocab_size: int) -> list[int]:
        """Returns a prompt of so many tokens; each is the start of the longer ones."""
        if self.tokenizer is None:
            random: list[int] = np.random.default_rng(0).integers(0, vocab_size, length).tolist()
            return random
        tokens: list[int] = self.tokenizer.encode(_SENTENCE)
        return (tokens * (length // len(tokens) + 1))[:length]


def run(parsed: argparse.Namespace) -> int:
    """Runs the modes that were asked for; returns 0 if each request had one output, else 1.

    Raises:
        DeterminismError: If an option is wrong or the model cannot be read.
    """
    console = Console()
    source = Source(parsed.model)
    model = source.read()
    try:
        options = EngineOptions.from_flags(parsed)
        if parsed.plain:
            options = dataclasses.replace(options, enable_deterministic_inference=False)
        params = SamplingParams(
            temperature=parsed.temperature,
            seed=parsed.seed,
            max_new_tokens=parsed.max_new_tokens,
            ignore_eos=True,
            logprobs=True,
        )
    except (TypeError, ValueError) as error:
        raise DeterminismError(str(error)) from error

    def open_engine(
        *,
        num_pages: int | None = None,
        speculative_tokens: int | None = None,
        prefix_cache: bool | None = None,
        reload: bool = False,
    ) -> Engine:
        changes: dict[str, Any] = {
            "num_pages": num_pages,
            "speculative_tokens": speculative_tokens,
            "prefix_cache": prefix_cache,
        }
        changed = dataclasses.replace(options, **{n: v for n, v in changes.items() if v is not None})
        return Engine(source.read() if reload else model, tokenizer=source.tokenizer, options=changed)

    modes = MODES if parsed.mode == "all" else (parsed.mode,)
    found: list[tuple[str, Samples]] = []
    with Progress(console=console, transient=True) as progress:
        for mode in modes:
            task = progress.add_task(mode, total=parsed.trials)
            given = Run(
                open_engine,
                lambda length: source.prompt(length, model.vocab_size),
                params,
                parsed.trials,
                lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
            )
            try:
                found += [(mode, samples) for samples in RUNNERS[mode](given)]
            except ValueError as error:
                raise DeterminismError(f"mode {mode}: {error}") from error
    console.print(_table(found, plain=parsed.plain))
    return 0 if all(samples.unique_bits == 1 for _, samples in found) else 1


def _table(found: list[tuple[str, Samples]], *, plain: bool) -> Table:
    table = Table(title="plain JAX" if plain else "bijax")
    for name in ("mode", "request", "total samples", "unique samples", "unique bits"):
        table.add_column(name, justify="left" if name in ("mode", "request") else "right")
    for mode, samples in found:
        numbers = (len(samples.completions), samples.unique_texts, samples.unique_bits)
        table.add_row(mode, samples.name, *map(str, numbers))
    return table
