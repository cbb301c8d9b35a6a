"""All ways of computing with one model, each compared with the texts generated alone."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from bijax.demo.compare import Comparison, Figures, Text, compare, figures
from bijax.demo.errors import DemoError
from bijax.demo.ways import Way


class Generate(Protocol):
    """A model that generates greedily for one batch of prompts, in a given way.

    It calls `on_tokens(count)` as tokens come.
    """

    def __call__(self, prompts: Sequence[Sequence[int]], way: Way, on_tokens: Callable[[int], None]) -> Sequence[Text]:
        """Generates one text for each prompt."""


class Watcher(Protocol):
    """Shows how far the work has come."""

    def begin(self, side: str, way: str) -> None:
        """A way of computing begins."""

    def advance(self, tokens: int) -> None:
        """This many more tokens are done, or will not be generated."""

    def end(self, side: str, way: str, found: Figures | None, seconds: float) -> None:
        """A way of computing has ended; it found nothing if it is the reference."""


@dataclasses.dataclass(frozen=True)
class WayResult:
    """One way of computing.

    Attributes:
        way: The way of computing.
        comparisons: Every generated text, compared with the one generated alone.
        figures: Their summary.
        seconds: How long it took, compilation included.
    """

    way: Way
    comparisons: tuple[Comparison, ...]
    figures: Figures
    seconds: float


@dataclasses.dataclass(frozen=True)
class SideResult:
    """One model, computed in every way.

    Attributes:
        side: Name of the model's implementation.
        alone: The texts generated alone, by prompt.
        alone_seconds: How long they took, compilation included.
        ways: The other ways.
    """

    side: str
    alone: tuple[Text, ...]
    alone_seconds: float
    ways: tuple[WayResult, ...]

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons of all ways."""
        return tuple(found for result in self.ways for found in result.comparisons)

    @property
    def total(self) -> Figures:
        """The figures of all ways together."""
        return figures(self.comparisons)


def compute_side(
    side: str,
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    reference: Way,
    others: Sequence[Way],
    *,
    max_new_tokens: int,
    watcher: Watcher,
) -> SideResult:
    """Generates the texts of all prompts in every way, the reference first.

    Args:
        side: What to call the model's implementation.
        generate: The model.
        prompts: Token ids of each prompt.
        reference: The way that the others are compared with; each prompt once, in order.
        others: The other ways.
        max_new_tokens: Longest text, in tokens.
        watcher: Called with the progress.

    Raises:
        DemoError: If a log-probability is not a finite number.
    """

    def run(way: Way) -> tuple[list[tuple[int, Text]], float]:
        watcher.begin(side, way.name)
        start = time.perf_counter()
        texts: list[tuple[int, Text]] = []
        for batch in way.batches:
            texts.extend(zip(batch, _run_batch(batch, way), strict=True))
        _check_finite(side, way, texts)
        return texts, time.perf_counter() - start

    def _run_batch(batch: tuple[int, ...], way: Way) -> Sequence[Text]:
        missing = max_new_tokens * len(batch)

        def on_tokens(count: int) -> None:
            nonlocal missing
            missing -= count
            watcher.advance(count)

        generated = generate([prompts[index] for index in batch], way, on_tokens)
        watcher.advance(missing)  # texts that ended early
        return generated

    texts, alone_seconds = run(reference)
    alone = tuple(text for _, text in texts)
    watcher.end(side, reference.name, None, alone_seconds)
    results: list[WayResult] = []
    for way in others:
        texts, seconds = run(way)
        comparisons = tuple(compare(prompt, alone[prompt], text) for prompt, text in texts)
        result = WayResult(way, comparisons, figures(comparisons), seconds)
        watcher.end(side, way.name, result.figures, seconds)
        results.append(result)
    return SideResult(side, alone, alone_seconds, tuple(results))


def _check_finite(side: str, way: Way, texts: Sequence[tuple[int, Text]]) -> None:
    # Bits of nan can agree too, but would prove nothing.
    for prompt, text in texts:
        bad = np.flatnonzero(~np.isfinite(text.logprobs))
        if bad.size:
            raise DemoError(
                f"{side}, {way.name}, prompt {prompt + 1}: every log-probability must be finite, got "
                f"{text.logprobs[bad[0]]} for token {bad[0] + 1}; the weights are damaged, or their numbers do not fit "
                "the dtype; try --dtype float32"
            )
