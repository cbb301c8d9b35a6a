"""From the work of a step to arrays of padded sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bijax.serving.programs import Extras, Rows, empty_extras, empty_rows
from bijax.serving.scheduler import Work
from bijax.serving.sizes import Sizes
from bijax.serving.slots import Slots


@dataclass(frozen=True)
class Batch:
    """Work that one call of the model does.

    Attributes:
        works: One for each row; the rows behind them are padding.
        shape: Rows and tokens.
    """

    works: tuple[Work, ...]
    shape: tuple[int, int]

    def arrays(self, slots: Slots) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, page table, starts and lengths, as models take them."""
        rows, width = self.shape
        works, count = self.works, len(self.works)
        for work in works:
            if work.sequence.written != len(work.sequence.pages):
                slots.write(work.sequence)
        tokens = np.zeros((rows, width), np.int32)
        if width == 1:
            tokens[:count, 0] = [work.tokens[0] for work in works]
        else:
            for row, work in enumerate(works):
                tokens[row, : len(work.tokens)] = work.tokens
        table = np.zeros((rows, slots.table.shape[1]), np.int32)
        table[:count] = slots.table[[work.sequence.slot for work in works]]
        start, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        start[:count] = [work.start for work in works]
        lengths[:count] = [len(work.tokens) for work in works]
        return tokens, table, start, lengths

    def unread(self) -> np.ndarray:
        """Returns the slot of each row's token that the host has not read, (rows,) int32; -1 for others."""
        found = np.full(self.shape[0], -1, np.int32)
        found[: len(self.works)] = [work.sequence.slot if work.unread else -1 for work in self.works]
        return found


@dataclass(slots=True)
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
        if work.samples:
            last = len(work.tokens) - work.drafts - 1
            places += [Place(work, row, last + draft) for draft in range(work.drafts + 1)]
    return places


def scored_places(batch: Batch) -> list[Place]:
    """Returns the tokens of prompts before those whose log-probabilities are wanted."""
    places = []
    for row, work in enumerate(batch.works):
        if not work.sequence.request.params.prompt_logprobs:
            continue
        first = work.sequence.request.next_prompt_logprob if work.sequence.index == 0 else None
        if first is not None:
            end = min(work.start + len(work.tokens), len(work.sequence.request.prompt) - 1)
            places += [Place(work, row, p - work.start) for p in range(max(first - 1, work.start), end)]
    return places


def slots_of(places: Sequence[Place], rows: int) -> np.ndarray:
    """Returns the slots that sampled tokens are kept in, (rows,) int32; -1 for padding and drafts."""
    found = np.full(rows, -1, np.int32)
    found[: len(places)] = [-1 if place.work.drafts else place.work.sequence.slot for place in places]
    return found


def sampling_rows(places: Sequence[Place], rows: int, vocab_size: int, slots: Slots) -> Rows:
    """Returns what `rows` rows of logits are sampled with, those behind the places being padding."""
    given, count = empty_rows(rows), len(places)
    index = [place.work.sequence.slot for place in places]
    given.seeds[:count], given.temperature[:count] = slots.seeds[index], slots.temperature[index]
    positions = [place.work.start + place.offset + 1 for place in places]
    given.positions[:count] = positions
    restricted = need_logprobs = False
    extras: Extras | None = None
    for row, place in enumerate(places):
        request = place.work.sequence.request
        params = request.params
        restricted |= params.has_filters
        need_logprobs |= params.logprobs
        if params.has_extras or positions[row] - len(request.prompt) < params.min_new_tokens:
            if extras is None:
                extras = empty_extras(rows, vocab_size)
                given.unread[:count] = [place.work.unread for place in places]
            _fill(extras, row, place, positions[row] - len(request.prompt))
    if restricted:
        for name in ("top_k", "top_p", "min_p"):
            getattr(given, name)[:count] = getattr(slots, name)[index]
    return given._replace(restricted=restricted or extras is not None, need_logprobs=need_logprobs, extras=extras)


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
