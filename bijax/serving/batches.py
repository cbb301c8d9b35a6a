"""From the work of a step to arrays of padded sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bijax.sampling import seed_words
from bijax.serving.programs import Extras, Rows, empty_extras, empty_rows
from bijax.serving.scheduler import Work
from bijax.serving.sizes import Sizes


@dataclass(frozen=True)
class Batch:
    """Work that one call of the model does.

    Attributes:
        works: One for each row; the rows behind them are padding.
        shape: Rows and tokens.
    """

    works: tuple[Work, ...]
    shape: tuple[int, int]

    def arrays(self, table_width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, page table, starts and lengths, as models take them."""
        rows, width = self.shape
        tokens = np.zeros((rows, width), np.int32)
        table = np.zeros((rows, table_width), np.int32)
        start, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, work in enumerate(self.works):
            tokens[row, : len(work.tokens)] = work.tokens
            table[row, : len(work.sequence.pages)] = work.sequence.pages
            start[row], lengths[row] = work.start, len(work.tokens)
        return tokens, table, start, lengths

    def unread(self) -> np.ndarray:
        """Returns the slot of each row's token that the host has not read, (rows,) int32; -1 for others."""
        slots = np.full(self.shape[0], -1, np.int32)
        for row, work in enumerate(self.works):
            if work.unread:
                slots[row] = work.sequence.slot
        return slots


@dataclass(frozen=True)
class Place:
    """A token behind which something is wanted.

    Attributes:
        work: Whose.
        row: Of the batch.
        offset: Of the token in the work.
    """

    work: Work
    row: int
    offset: int


def cut(works: Sequence[Work], sizes: Sizes) -> Iterator[Batch]:
    """Yields batches of one token or drafts, and of parts of prompts of similar lengths."""
    decode = [w for w in works if len(w.tokens) == 1 + w.drafts]
    for group, width in (([w for w in decode if not w.drafts], 1), ([w for w in decode if w.drafts], sizes.drafted)):
        if group:
            yield Batch(tuple(group), (sizes.decode_for(len(group)), width))
    prefill = [w for w in works if len(w.tokens) != 1 + w.drafts]
    for chunk in sorted({sizes.chunk_for(len(w.tokens)) for w in prefill}):
        group = [w for w in prefill if sizes.chunk_for(len(w.tokens)) == chunk]
        while group:
            rows, width = sizes.prefill_for(chunk, rows=len(group))
            yield Batch(tuple(group[:rows]), (rows, width))
            group = group[rows:]


def sampled_places(batch: Batch) -> list[Place]:
    """Returns the tokens behind which the next one is sampled: the last of a sequence and the drafts after it."""
    places = []
    for row, work in enumerate(batch.works):
        if work.reaches_end and work.sequence.request.params.max_new_tokens:
            last = len(work.tokens) - work.drafts - 1
            places += [Place(work, row, last + draft) for draft in range(work.drafts + 1)]
    return places


def scored_places(batch: Batch) -> list[Place]:
    """Returns the tokens of prompts before those whose log-probabilities are wanted."""
    places = []
    for row, work in enumerate(batch.works):
        first = work.sequence.request.next_prompt_logprob if work.sequence.index == 0 else None
        if first is not None:
            end = min(work.start + len(work.tokens), len(work.sequence.request.prompt) - 1)
            places += [Place(work, row, p - work.start) for p in range(max(first - 1, work.start), end)]
    return places


def slots_of(places: Sequence[Place], rows: int) -> np.ndarray:
    """Returns the slots that sampled tokens are kept in, (rows,) int32; -1 for padding and drafts."""
    slots = np.full(rows, -1, np.int32)
    for row, place in enumerate(places):
        if not place.work.drafts:
            slots[row] = place.work.sequence.slot
    return slots


def sampling_rows(places: Sequence[Place], rows: int, vocab_size: int) -> Rows:
    """Returns what `rows` rows of logits are sampled with, those behind the places being padding."""
    given = empty_rows(rows)
    seeds = []
    restricted = need_logprobs = False
    extras: Extras | None = None
    for row, place in enumerate(places):
        sequence, params = place.work.sequence, place.work.sequence.request.params
        seeds.append(sequence.seed)
        given.unread[row] = place.work.unread
        position = place.work.start + place.offset + 1
        given.positions[row] = position
        given.temperature[row] = params.temperature
        if params.has_filters:
            restricted = True
            given.top_k[row] = min(params.top_k or 0, vocab_size)
            given.top_p[row], given.min_p[row] = params.top_p, params.min_p
        need_logprobs |= params.logprobs
        length = position - len(sequence.request.prompt)
        if _has_extras(place, length):
            extras = empty_extras(rows, vocab_size) if extras is None else extras
            _fill(extras, row, place, length)
    given.seeds[: len(seeds)] = seed_words(seeds)
    return given._replace(restricted=restricted or extras is not None, need_logprobs=need_logprobs, extras=extras)


def _has_extras(place: Place, length: int) -> bool:
    params = place.work.sequence.request.params
    return params.has_extras or length < params.min_new_tokens


def _fill(extras: Extras, row: int, place: Place, length: int) -> None:
    """Writes a row. `length` is the number of tokens of the output before the one that is sampled."""
    sequence = place.work.sequence
    request, params = sequence.request, sequence.request.params
    extras.repetition_penalty[row] = params.repetition_penalty
    extras.frequency_penalty[row] = params.frequency_penalty
    extras.presence_penalty[row] = params.presence_penalty
    extras.prompt_mask[row] = request.in_prompt
    extras.output_counts[row] = sequence.counts
    if place.work.drafts:
        drafts = place.work.tokens[-place.work.drafts :]
        drafted = length - (len(sequence.tokens) - len(request.prompt))
        np.add.at(extras.output_counts[row], list(drafts[:drafted]), 1)
    extras.logit_bias[row] = request.bias
    extras.allowed[row] = request.allowed
    if length < params.min_new_tokens:
        extras.allowed[row, [token for token in sequence.stop_tokens if token < extras.allowed.shape[1]]] = False
