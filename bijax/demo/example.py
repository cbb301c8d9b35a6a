"""Two texts of one prompt side by side, cut at the first token in which they differ."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bijax.demo.compare import Comparison, Text
from bijax.demo.compute import SideResult

type Decode = Callable[[np.ndarray], str]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A text cut at the first token that differs from the other text's.

    Attributes:
        before: What both texts begin with.
        token: The first token that differs, or "" if none does.
        after: The rest.
    """

    before: str
    token: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The text of a prompt, alone and in a batch.

    Attributes:
        side: What computed them.
        alone: The text generated alone.
        batch: The text generated in a batch.
        parts_at: Number of the first token that differs, from 1; None if none does.
    """

    side: str
    alone: Pieces
    batch: Pieces
    parts_at: int | None


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt, answered alone and in a batch, by each side.

    Attributes:
        prompt: The prompt.
        way: The way of computing that is compared with alone.
        pairs: The texts of each side.
    """

    prompt: str
    way: str
    pairs: tuple[Pair, ...]


def examples(sides: Sequence[SideResult], prompts: Sequence[str], decode: Decode, *, most: int) -> list[Example]:
    """Picks prompts whose text changes on any side, the earliest divergence first, each in the way that shows it.

    Args:
        sides: The results, all with the same ways.
        prompts: The prompts as the user knows them.
        decode: Turns token ids into text.
        most: Number of examples, at most.

    Returns:
        The examples; none if no text changes.
    """
    earliest: dict[int, tuple[int, int, int]] = {}
    for side in sides:
        for way, result in enumerate(side.ways):
            for index, found in enumerate(result.comparisons):
                if found.parted:
                    candidate = (found.common, way, index)
                    earliest[found.prompt] = min(earliest.get(found.prompt, candidate), candidate)
    chosen = sorted(earliest.items(), key=lambda item: item[1])[:most]
    return [
        Example(
            prompts[prompt],
            sides[0].ways[way].way.name,
            tuple(_pair(side, side.ways[way].comparisons[index], decode) for side in sides),
        )
        for prompt, (_, way, index) in chosen
    ]


def _pair(side: SideResult, found: Comparison, decode: Decode) -> Pair:
    alone = side.alone[found.prompt]
    if not found.parted:
        whole = Pieces(decode(alone.tokens))
        return Pair(side.side, whole, whole, None)
    return Pair(side.side, _cut(alone, found.common, decode), _cut(found.other, found.common, decode), found.common + 1)


def _cut(text: Text, common: int, decode: Decode) -> Pieces:
    whole = decode(text.tokens)
    before = _common_length(whole, decode(text.tokens[:common]))
    through = _common_length(whole, decode(text.tokens[: common + 1]))
    return Pieces(whole[:before], whole[before:through], whole[through:])


def _common_length(one: str, other: str) -> int:
    # A character may take several tokens, so that the text of the first tokens is not how the whole text begins.
    unequal = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))
