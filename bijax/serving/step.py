"""One step on the device: dispatched first, read later."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bijax.serving import device
from bijax.serving.batches import (
    Batch,
    Place,
    embedded_places,
    rows_of,
    sampled_places,
    sampling_rows,
    scored_places,
)
from bijax.serving.device import Scored
from bijax.serving.outputs import TokenLogprob
from bijax.serving.programs import Drawn, Programs
from bijax.serving.scheduler import Work


@dataclass
class Results:
    """The results of a step.

    Attributes:
        works: The works of the step.
        sampled: The tokens sampled for each work at its sequence's end: the next one, and one after each draft.
        measured: Their log-probabilities, if the request wants them.
        scored: For each work the log-probabilities of tokens of its prompt, in order.
        embedded: Embeddings of prompts, (D,) float32 each.
    """

    works: list[Work] = field(default_factory=list)
    sampled: dict[Work, list[int]] = field(default_factory=dict)
    measured: dict[Work, list[TokenLogprob]] = field(default_factory=dict)
    scored: dict[Work, list[TokenLogprob]] = field(default_factory=dict)
    embedded: dict[Work, np.ndarray] = field(default_factory=dict)


class Step:
    """The work of a step on its way through the device.

    Args:
        programs: Where it is computed.
        batches: The work.
        weight_version: Of the weights that it is computed with.

    Attributes:
        weight_version: The same.
        hidden: The batches with their inputs and hidden states, if the model's head drafts after them.
    """

    def __init__(self, programs: Programs, batches: Iterable[Batch], weight_version: str) -> None:
        self.weight_version = weight_version
        self._works: list[Work] = []
        self._sampled: list[tuple[Sequence[Work], Drawn]] = []
        self._scored: list[tuple[list[Place], list[int], Scored]] = []
        self._embedded: list[tuple[list[Place], jax.Array]] = []
        self.hidden: list[tuple[Batch, np.ndarray, jax.Array]] = []
        for batch in batches:
            self._works += batch.works
            if batch.drafts:
                self._dispatch_drafts(programs, batch)
            else:
                self._dispatch(programs, batch)

    def _dispatch(self, programs: Programs, batch: Batch) -> None:
        packed = batch.packed(programs.slots)  # writes the slots that the next line reads
        given = rows_of(batch, programs.model.vocab_size, programs.slots)
        common_prefix = programs.asks_for_common_prefix(*batch.shape) and programs.have_common_prefix(
            [work.sequence.slot for work in batch.works], (work.start for work in batch.works)
        )
        hidden, drawn = programs.advance(packed, given, common_prefix=common_prefix)
        if programs.draft_steps:
            self.hidden.append((batch, packed, programs.kept(hidden)))
        self._sample(batch.works, drawn)
        scored = scored_places(batch)
        # A prompt has more places than the batch has rows.
        size = batch.shape[0] if len(scored) <= batch.shape[0] else programs.sizes.decode[-1]
        for places in _slices(scored, size):
            tokens = [place.work.sequence.tokens[place.work.start + place.offset + 1] for place in places]
            padded = np.array(tokens + [0] * (size - len(tokens)), np.int32)
            logits = programs.logits(hidden, _index(places, size, batch.shape[1]))
            self._scored.append((places, tokens, programs.score(logits, padded)))

        ends = embedded_places(batch)
        if ends:
            self._embedded.append((ends, programs.embed(hidden, _index(ends, *batch.shape))))

    def _dispatch_drafts(self, programs: Programs, batch: Batch) -> None:
        rows, width = batch.shape
        packed = batch.packed(programs.slots)
        hidden = programs.extend(packed)
        if programs.draft_steps:
            self.hidden.append((batch, packed, hidden))
        for places in _slices(sampled_places(batch), rows):
            logits = programs.logits(hidden, _index(places, rows, width))
            given = sampling_rows(places, range(len(places)), rows, programs.model.vocab_size, programs.slots)
            self._sample([place.work for place in places], programs.sample(logits, given))

    def _sample(self, works: Sequence[Work], drawn: Drawn) -> None:
        """Notes for which work each row was drawn, and lets its token come to the host if it is not there."""
        for array in jax.tree.leaves(drawn):
            if array.sharding.memory_kind != device.HOST:
                array.copy_to_host_async()
        self._sampled.append((works, drawn))

    def read(self) -> Results:
        """Waits for the device and returns its results."""
        results = Results(self._works)
        for works, drawn in self._sampled:
            tokens = np.asarray(drawn.tokens).tolist()  # padding rows come after the works
            for work, token in zip(works, tokens, strict=False):
                if work.drafts and work in results.sampled:
                    results.sampled[work].append(token)
                elif work.samples:
                    results.sampled[work] = [token]
            if drawn.measured is None:
                continue
            measured = _host(drawn.measured)
            for row, work in enumerate(works):
                params = work.sequence.request.params
                if work.samples and params.logprobs:
                    results.measured.setdefault(work, []).append(
                        TokenLogprob(
                            float(measured.logprobs[row]),
                            tokens[row],
                            _top(measured.top_logprobs[row], measured.top_tokens[row], params.top_logprobs),
                            float(measured.sampled_logprobs[row]),
                        )
                    )
        for places, given, scored in self._scored:
            of_prompt = _host(scored)
            for row, (place, token) in enumerate(zip(places, given, strict=True)):
                top = place.work.sequence.request.params.top_logprobs
                results.scored.setdefault(place.work, []).append(
                    TokenLogprob(
                        float(of_prompt.logprobs[row]),
                        token,
                        _top(of_prompt.top_logprobs[row], of_prompt.top_tokens[row], top),
                    )
                )
        for places, embedded in self._embedded:
            for row, place in zip(np.asarray(embedded), places, strict=False):  # padding rows come last
                results.embedded[place.work] = row
        return results


def _index(places: Sequence[Place], size: int, width: int) -> np.ndarray:
    """Returns the places as numbers of tokens in a batch of rows of `width` tokens, padded to `size`."""
    index = np.zeros(size, np.int32)
    index[: len(places)] = [place.row * width + place.offset for place in places]
    return index


def _slices(places: list[Place], size: int) -> list[list[Place]]:
    return [places[i : i + size] for i in range(0, len(places), size)]


def _host[T](arrays: T) -> T:
    return jax.tree.map(np.asarray, arrays)


def _top(logprobs: Any, tokens: Any, number: int) -> tuple[tuple[float, int], ...]:
    return tuple(zip(logprobs[:number].tolist(), tokens[:number].tolist(), strict=True)) if number else ()
