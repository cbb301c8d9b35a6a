"""The ways of computing the same texts, all of which should give the same bits."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

Cache = Literal["contiguous", "paged"]

BATCH_SIZES = (2, 3, 5, 8)
CHUNKS = (1, 7, 64, None)
CACHES: tuple[Cache, ...] = ("contiguous", "paged")
QUICK_BATCH_SIZES = (2, 5)
QUICK_CHUNKS = (7, None)
ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing.

    Attributes:
        name: What the table calls it.
        batches: Batches, one after the other; each holds the indices of its prompts in their order.
        prefill_chunk: Prompt tokens per prefill call; None for the whole prompt.
        cache: Where keys and values are stored.
    """

    name: str
    batches: tuple[tuple[int, ...], ...]
    prefill_chunk: int | None = None
    cache: Cache = "contiguous"

    @property
    def num_texts(self) -> int:
        """Texts that this way generates."""
        return sum(map(len, self.batches))


def alone(num_prompts: int) -> Way:
    """The reference: each prompt alone, prefilled whole, with a contiguous cache."""
    return Way("alone", _one_by_one(num_prompts))


def other_ways(num_prompts: int, *, seed: int, quick: bool = False) -> tuple[Way, ...]:
    """Everything that is compared with `alone`: batches of several sizes, then chunks and caches one prompt at a time.

    Args:
        num_prompts: How many prompts there are, at least 1.
        seed: Who meets whom in the batches; any integer >= 0.
        quick: Whether to take fewer sizes and chunks.

    Example:
        >>> for way in other_ways(2, seed=0, quick=True):
        ...     print(way.name, way.num_texts)
        batches of 2 4
        batches of 5 10
        chunk 7, contiguous 2
        chunk 7, paged 2
        whole, contiguous 2
        whole, paged 2
    """
    rng = np.random.default_rng(seed)
    batches = [
        Way(f"batches of {size}", mixed_batches(rng.permutation(num_prompts).tolist(), size))
        for size in (QUICK_BATCH_SIZES if quick else BATCH_SIZES)
    ]
    chunks = [
        Way(
            f"{'whole' if chunk is None else f'chunk {chunk}'}, {cache}",
            _one_by_one(num_prompts),
            prefill_chunk=chunk,
            cache=cache,
        )
        for chunk in (QUICK_CHUNKS if quick else CHUNKS)
        for cache in CACHES
    ]
    return (*batches, *chunks)


def mixed_batches(order: Sequence[int], size: int, rounds: int = ROUNDS) -> tuple[tuple[int, ...], ...]:
    """Puts every prompt into one batch of `size` a round, at another place and among other neighbours each time.

    The first round cuts `order` into batches and fills up the last one with prompts from the start, so that every batch
    has exactly `size` places. Each later round shifts every prompt by one place and, depending on the place, by a
    different number of batches. With few prompts, neighbours may repeat, or a prompt may be batched with itself.

    Example:
        >>> mixed_batches([0, 1, 2, 3], 2)
        ((0, 1), (2, 3), (3, 0), (1, 2))
        >>> mixed_batches([0, 1], 3)
        ((0, 1, 0), (0, 0, 1))
    """
    count = -(-len(order) // size)
    places = np.resize(np.asarray(order), (count, size))
    batches: list[tuple[int, ...]] = []
    for turn in range(rounds):
        columns = [np.roll(places[:, place], turn * place) for place in range(size)]
        shifted = np.roll(np.stack(columns, axis=1), turn, axis=1)
        batches.extend(tuple(batch) for batch in shifted.tolist())
    return tuple(batches)


def _one_by_one(num_prompts: int) -> tuple[tuple[int, ...], ...]:
    return tuple((prompt,) for prompt in range(num_prompts))
