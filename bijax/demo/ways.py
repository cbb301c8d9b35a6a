"""The ways of computing the same texts, all of which should give the same bits."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

Cache = Literal["contiguous", "paged"]

BATCH_SIZES = (2, 4, 8)
QUICK_BATCH_SIZES = (4,)
CHUNK = 7
PREFILLS: tuple[tuple[int | None, Cache], ...] = ((None, "paged"), (CHUNK, "contiguous"), (CHUNK, "paged"))
QUICK_PREFILLS: tuple[tuple[int | None, Cache], ...] = ((CHUNK, "paged"),)


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
    return Way("alone", tuple((prompt,) for prompt in range(num_prompts)))


def other_ways(num_prompts: int, *, seed: int, quick: bool = False) -> tuple[Way, ...]:
    """Everything that is compared with `alone`: batches of several sizes, then other prefills and caches.

    Batches of n come in n / 2 rounds, so that each size takes about as many steps; quick ones in one.

    Args:
        num_prompts: How many prompts there are, at least 1.
        seed: How prompts are grouped into batches; any integer >= 0.
        quick: Whether to take fewer sizes and prefills.

    Example:
        >>> for way in other_ways(8, seed=0):
        ...     print(way.name, way.num_texts)
        batches of 2 8
        batches of 4 16
        batches of 8 32
        batches of 8, paged 8
        batches of 8, chunks of 7 8
        batches of 8, chunks of 7, paged 8
    """
    rng = np.random.default_rng(seed)
    sizes = QUICK_BATCH_SIZES if quick else BATCH_SIZES
    batches = [
        Way(
            f"batches of {size}",
            mixed_batches(rng.permutation(num_prompts).tolist(), size, 1 if quick else max(1, size // 2)),
        )
        for size in sizes
    ]
    largest = mixed_batches(rng.permutation(num_prompts).tolist(), sizes[-1], 1)
    prefills = [
        Way(_name(sizes[-1], chunk, cache), largest, prefill_chunk=chunk, cache=cache)
        for chunk, cache in (QUICK_PREFILLS if quick else PREFILLS)
    ]
    return (*batches, *prefills)


def _name(size: int, chunk: int | None, cache: Cache) -> str:
    chunks = "" if chunk is None else f", chunks of {chunk}"
    return f"batches of {size}{chunks}{', paged' if cache == 'paged' else ''}"


def mixed_batches(order: Sequence[int], size: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """Puts every prompt into one batch of `size` a round, at another place and among other neighbours each time.

    The first round cuts `order` into batches and fills up the last one with prompts from the start, so that every batch
    has exactly `size` places. Each later round shifts every prompt by one place and, depending on the place, by a
    different number of batches. With few prompts, neighbours may repeat, or a prompt may be batched with itself.

    Example:
        >>> mixed_batches([0, 1, 2, 3], 2, 2)
        ((0, 1), (2, 3), (3, 0), (1, 2))
        >>> mixed_batches([0, 1], 3, 2)
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
