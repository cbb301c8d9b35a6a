"""One step on the device: dispatched first, read later."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bijax.serving.batches import Batch, Place, sampled_places, sampling_rows, scored_places, slots_of
from bijax.serving.outputs import TokenLogprob
from bijax.serving.programs import Drawn, Programs, Scored
from bijax.serving.scheduler import Work


@dataclass
class Results:
    """What a step has brought.

    Attributes:
        works: The work that was done.
        sampled: For each work at the end of its sequence the tokens sampled: the next one, and one behind each draft.
        measured: Their log-probabilities, if the request asked for them.
        scored: For each work the log-probabilities of tokens of its prompt, in order.
    """

    works: list[Work] = field(default_factory=list)
    sampled: dict[Work, list[int]] = field(default_factory=dict)
    measured: dict[Work, list[TokenLogprob]] = field(default_factory=dict)
    scored: dict[Work, list[TokenLogprob]] = field(default_factory=dict)


class Step:
    """The work of a step on its way through the device.

    Args:
        programs: Where it is computed.
        batches: The work.
        weight_version: Of the weights that it is computed with.
    """

    def __init__(self, programs: Programs, batches: Iterable[Batch], weight_version: str) -> None:
        self.weight_version = weight_version
        self._works: list[Work] = []
        self._sampled: list[tuple[list[Place], Drawn]] = []
        self._scored: list[tuple[list[Place], list[int], Scored]] = []
        for batch in batches:
            self._works += batch.works
            self._dispatch(programs, batch)

    def _dispatch(self, programs: Programs, batch: Batch) -> None:
        rows, width = batch.shape
        hidden = programs.extend(*batch.arrays(programs.slots), batch.unread())

        def logits(places: list[Place], size: int) -> jax.Array:
            index = np.zeros(size, np.int32)
            index[: len(places)] = [place.row * width + place.offset for place in places]
            return programs.logits(hidden, index)

        for places in _slices(sampled_places(batch), rows):
            given = sampling_rows(places, rows, programs.model.vocab_size, programs.slots)
            drawn = programs.sample(logits(places, rows), given, slots_of(places, rows))
            for array in jax.tree.leaves(drawn):
                array.copy_to_host_async()
            self._sampled.append((places, drawn))
        scored = scored_places(batch)
        # A prompt has more places than the batch has rows.
        size = rows if len(scored) <= rows else programs.sizes.decode[-1]
        for places in _slices(scored, size):
            tokens = [place.work.sequence.tokens[place.work.start + place.offset + 1] for place in places]
            padded = np.array(tokens + [0] * (size - len(tokens)), np.int32)
            self._scored.append((places, tokens, programs.score(logits(places, size), padded)))

    def read(self) -> Results:
        """Waits for the device and returns what it computed."""
        results = Results(self._works)
        for places, drawn in self._sampled:
            tokens, measured = _host(drawn)
            for place, token in zip(places, tokens.tolist(), strict=False):  # rows of padding are behind the places
                if place.work in results.sampled:
                    results.sampled[place.work].append(token)
                else:
                    results.sampled[place.work] = [token]
            if measured is None:
                continue
            for row, place in enumerate(places):
                params = place.work.sequence.request.params
                if params.logprobs:
                    results.measured.setdefault(place.work, []).append(
                        TokenLogprob(
                            float(measured.logprobs[row]),
                            int(tokens[row]),
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
        return results


def _slices(places: list[Place], size: int) -> list[list[Place]]:
    return [places[i : i + size] for i in range(0, len(places), size)]


def _host[T](arrays: T) -> T:
    on_host: T = jax.tree.map(np.asarray, arrays)
    return on_host


def _top(logprobs: Any, tokens: Any, number: int) -> tuple[tuple[float, int], ...]:
    return tuple(zip(logprobs[:number].tolist(), tokens[:number].tolist(), strict=True)) if number else ()
