"""The work of a step as padded arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bijax.serving.packed import pack
from bijax.serving.rows import Extras, Rows, empty_extras, empty_rows
from bijax.serving.scheduler import Work
from bijax.serving.sizes import Sizes
from bijax.serving.slots import Slots


@dataclass(frozen=True)
class Batch:
    """The work of one call of the model.

    Attributes:
        works: One for each row; the rows after them are padding.
        shape: Rows and tokens.
    """

    works: tuple[Work, ...]
    shape: tuple[int, int]

    @property
    def drafts(self) -> bool:
        """Whether the works have drafts: either all or none."""
        return self.works[0].drafts > 0

    def packed(self, slots: Slots) -> np.ndarray:
        """Returns the model's inputs; see `bijax.serving.packed`."""
        works = self.works
        for work in works:
            if work.sequence.written != len(work.sequence.pages):
                slots.write(work.sequence)
        index = [work.sequence.slot for work in works]
        calls = [
            (work.start, len(work.tokens), slot if work.unread else -1, slot if work.samples else -1)
            for work, slot in zip(works, index, strict=True)
        ]
        return pack(calls, slots.rows[index], [work.tokens for work in works], *self.shape)


@dataclass(slots=True)
class Place:
    """A token position whose logits are needed.

    Attributes:
        work: The work that it belongs to.
        row: Row of the batch.
        offset: Index of the token in the work.
    """

    work: Work
    row: int
    offset: int


def cut(works: Sequence[Work], sizes: Sizes) -> Iterator[Batch]:
    """Yields batches of single tokens or drafts, and batches of prompt chunks of similar lengths."""
    single: list[Work] = []
    drafted: list[Work] = []
    prefill: list[Work] = []
    for work in works:
        (drafted if work.drafts else single if len(work.tokens) == 1 else prefill).append(work)
    for group, width in ((single, 1), (drafted, sizes.drafted)):
        if group:
            yield Batch(tuple(group), (sizes.decode_for(len(group)), width))
    for chunk in sorted({sizes.chunk_for(len(w.tokens)) for w in prefill}):
        group = [w for w in prefill if sizes.chunk_for(len(w.tokens)) == chunk]
        while group:
            rows, width = sizes.prefill_for(chunk, rows=len(group))
            yield Batch(tuple(group[:rows]), (rows, width))
            group = group[rows:]


def sampled_places(batch: Batch) -> list[Place]:
    """Returns the positions after which a token is sampled: the last of a sequence and the drafts after it."""
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


def embedded_places(batch: Batch) -> list[Place]:
    """Returns the last tokens of prompts whose embeddings are wanted."""
    return [
        Place(work, row, len(work.tokens) - 1)
        for row, work in enumerate(batch.works)
        if work.reaches_end and work.sequence.request.params.embedding and work.sequence.index == 0
    ]


def rows_of(batch: Batch, vocab_size: int, slots: Slots) -> Rows | None:
    """Returns the sampling parameters of a batch without drafts; None where seeds and temperatures suffice."""
    if all(work.sequence.request.params.is_plain for work in batch.works):
        return None
    places = [Place(work, row, len(work.tokens) - 1) for row, work in enumerate(batch.works) if work.samples]
    return sampling_rows(places, [place.row for place in places], batch.shape[0], vocab_size, slots)


def sampling_rows(places: Sequence[Place], at: Sequence[int], rows: int, vocab_size: int, slots: Slots) -> Rows:
    """Returns the sampling parameters of `rows` rows of logits, the first for the places `at`, the others padding."""
    given, where = empty_rows(rows), list(at)
    index = [place.work.sequence.slot for place in places]
    given.seeds[where], given.temperature[where] = slots.seeds[index], slots.temperature[index]
    positions = [place.work.start + place.offset + 1 for place in places]
    given.positions[where] = positions
    restricted = need_logprobs = False
    extras: Extras | None = None
    for row, place, position in zip(where, places, positions, strict=True):
        request = place.work.sequence.request
        params = request.params
        restricted |= params.has_filters
        need_logprobs |= params.logprobs
        length = position - len(request.prompt)
        if params.has_extras or length < params.min_new_tokens:
            if extras is None:
                extras = empty_extras(rows, vocab_size)
                given.unread[where] = [place.work.unread for place in places]
            _fill(extras, row, place, length)
    if restricted:
        for name in ("top_k", "top_p", "min_p"):
            getattr(given, name)[where] = getattr(slots, name)[index]
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
    before: list[int] = []  # drafts
    if place.work.drafts:
        drafts = place.work.tokens[-place.work.drafts :]
        before = list(drafts[: length - (len(sequence.tokens) - len(request.prompt))])
        np.add.at(extras.output_counts[row], before, 1)
    extras.logit_bias[row] = request.bias
    extras.allowed[row] = request.allowed
    if sequence.matcher is not None:
        extras.allowed[row] &= sequence.matcher.mask(before)
    if length < params.min_new_tokens:
        extras.allowed[row, [token for token in sequence.stop_tokens if token < extras.allowed.shape[1]]] = False
