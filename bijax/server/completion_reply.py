"""Replies and events of `/v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from bijax.serving import Completion, RequestOutput, TokenLogprob

from .openai_reply import ReplyHead
from .prompts import Prompt
from .text_offsets import TextOffsets

KIND = "text_completion"


class CompletionReply:
    """Writes the reply, or cuts growing outputs into the events of a stream.

    Sample i of prompt p has the index `p * n + i`.

    Args:
        head: The fields of every reply.
        prompts: The prompts.
        echo: Whether a text begins with its prompt.
    """

    def __init__(self, head: ReplyHead, prompts: Sequence[Prompt], *, echo: bool) -> None:
        self._head = head
        self._prompts = prompts
        self._echo = echo
        self._choices: dict[int, _Choice] = {}

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The reply to outputs that are finished."""
        choices = [choice for p, output in enumerate(outputs) for choice in self._new(p, output)]
        return self._head.reply(KIND, choices, usage=self._head.usage(outputs))

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for the new part of an output."""
        for choice in self._new(prompt_index, output):
            yield self._head.reply(KIND, [choice])

    def usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The event about the number of tokens."""
        return self._head.reply(KIND, [], usage=self._head.usage(outputs))

    def _new(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        prompt = self._prompts[prompt_index]
        for completion in output.completions:
            index = prompt_index * prompt.params.n + completion.index
            if index not in self._choices:
                self._choices[index] = _Choice(self._head, prompt, echo=self._echo)
            new = self._choices[index].new(output, completion)
            if new is not None:
                yield {"index": index, **new}


class _Choice:
    """A choice, and what of it has been sent.

    The log-probabilities of a token are sent together with the text in which it begins.
    """

    def __init__(self, head: ReplyHead, prompt: Prompt, *, echo: bool) -> None:
        self._head = head
        self._params = prompt.params
        self._echo = echo
        left_out = head.tokens.special() if prompt.params.skip_special_tokens else frozenset()
        self._offsets = TextOffsets(head.tokens, left_out)
        self._places: list[int] = []  # of the output's tokens in the output's text
        self._shift = 0  # characters of the prompt
        self._begun = False
        self._num_sent = 0  # entries
        self._num_characters = 0
        self._finished = False

    def new(self, output: RequestOutput, completion: Completion) -> dict[str, Any] | None:
        """The new part, as a choice; None for nothing."""
        text = completion.text or ""
        delta = text[self._num_characters :]
        entries = self._entries(completion) if self._params.logprobs else []
        finished = completion.finish_reason is not None
        if self._begun and not delta and not entries and finished == self._finished:
            return None
        if self._echo and not self._begun:
            echoed = self._head.tokens.decode(output.prompt_tokens)
            self._shift = len(echoed)
            entries = [*self._prompt_entries(output), *self._shifted(entries)]
            delta = echoed + delta
        else:
            entries = list(self._shifted(entries))
        self._begun, self._finished, self._num_characters = True, finished, len(text)
        return {
            "text": delta,
            "logprobs": self._head.completion_logprobs(entries) if self._params.logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "seed": completion.seed,
        }

    def _entries(self, completion: Completion) -> list[tuple[int, TokenLogprob | None, int]]:
        """The entries whose text is available. Tokens cut off by a stop string are placed at the end."""
        self._places += [self._offsets.add(entry.token) for entry in completion.logprobs[len(self._places) :]]
        begin, end, length = self._num_sent, len(self._places), len(completion.text or "")
        if completion.finish_reason is None and completion.text is not None:
            end = next((i for i in range(begin, end) if self._places[i] >= length), end)
        self._num_sent = end
        return [
            (entry.token, entry, min(place, length))
            for entry, place in zip(completion.logprobs[begin:end], self._places[begin:end], strict=True)
        ]

    def _shifted(
        self, entries: list[tuple[int, TokenLogprob | None, int]]
    ) -> Iterator[tuple[int, TokenLogprob | None, int]]:
        return ((token, entry, self._shift + place) for token, entry, place in entries)

    def _prompt_entries(self, output: RequestOutput) -> Iterator[tuple[int, TokenLogprob | None, int]]:
        if output.prompt_logprobs is not None:
            offsets = TextOffsets(self._head.tokens)
            for token, entry in zip(output.prompt_tokens, output.prompt_logprobs, strict=True):
                yield token, entry, min(offsets.add(token), self._shift)
