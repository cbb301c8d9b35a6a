"""A model for the demo's tests, made of arithmetic: it is invariant, or errs where the test says so."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bijax.demo.compare import Text
from bijax.demo.ways import Way


@dataclasses.dataclass
class FakeModel:
    """Its text depends on the prompt's tokens alone; `disturb` may change it, knowing what it should not.

    `disturb(way, batch_size, place, text)` returns the text to give instead.
    """

    max_new_tokens: int
    disturb: Callable[[Way, int, int, Text], Text] = lambda way, batch_size, place, text: text

    def __call__(self, prompts: Sequence[Sequence[int]], way: Way, on_tokens: Callable[[int], None]) -> Sequence[Text]:
        texts = []
        for place, prompt in enumerate(prompts):
            rng = np.random.default_rng(list(prompt))
            length = int(rng.integers(self.max_new_tokens // 2, self.max_new_tokens, endpoint=True))
            tokens = rng.integers(3, 250, self.max_new_tokens)[:length]
            logprobs = -rng.exponential(1, self.max_new_tokens).astype(np.float32)[:length]
            text = self.disturb(way, len(prompts), place, Text(tokens, logprobs))
            on_tokens(len(text.tokens))
            texts.append(text)
        return texts


def shift(logprobs: np.ndarray, ulps: int | np.ndarray) -> np.ndarray:
    """Moves float32 numbers by so many representable ones, away from zero."""
    return (logprobs.view(np.uint32) + np.asarray(ulps, np.uint32)).view(np.float32)


class SilentWatcher:
    """Adds up its calls."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended: list[tuple[str, str]] = []

    def begin(self, side: str, way: str) -> None:
        pass

    def advance(self, tokens: int) -> None:
        self.tokens += tokens

    def end(self, side: str, way: str, found: object, seconds: float) -> None:
        self.ended.append((side, way))
