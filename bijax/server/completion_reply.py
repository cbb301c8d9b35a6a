"""Replies and events of `/v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from bijax.serving import Completion, RequestOutput, TokenLogprob

from .openai_reply import ReplyHead
from .prompts import Prompt

KIND = "text_completion"


class CompletionReply:
    """Writes the reply, or cuts growing outputs into the events of a stream.

    Choices are numbered through: sample i of prompt p has the index `p * n + i`.

    Args:
        head: What stands in every reply.
        prompts: The prompts.
        echo: Whether a text begins with its prompt.
    """

    def __init__(self, head: ReplyHead, prompts: Sequence[Prompt], *, echo: bool) -> None:
        self._head = head
        self._prompts = prompts
        self._echo = echo
        self._sent: dict[int, Completion] = {}

    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The reply to outputs that are finished."""
        choices = [
            self._choice(p, output, completion, Completion(completion.index, (), ""), begin=True)
            for p, output in enumerate(outputs)
            for completion in output.completions
        ]
        return self._head.reply(KIND, choices, usage=self._head.usage(outputs))

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for what is new in an output."""
        for completion in output.completions:
            index = prompt_index * self._prompts[prompt_index].params.n + completion.index
            sent = self._sent.get(index)
            new = sent is None or (completion.text, len(completion.logprobs)) != (sent.text, len(sent.logprobs))
            if new or completion.finish_reason != (sent and sent.finish_reason):
                before = sent or Completion(completion.index, (), "")
                choice = self._choice(prompt_index, output, completion, before, begin=sent is None)
                yield self._head.reply(KIND, [choice])
            self._sent[index] = completion

    def usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The event about the number of tokens."""
        return self._head.reply(KIND, [], usage=self._head.usage(outputs))

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: Completion, sent: Completion, *, begin: bool
    ) -> dict[str, Any]:
        params = self._prompts[prompt_index].params
        prompt_text = self._head.tokens.decode(output.prompt_tokens) if self._echo else ""
        text = (completion.text or "")[len(sent.text or "") :]
        logprobs = None
        if params.logprobs:
            entries: list[tuple[int, TokenLogprob | None]] = [
                (entry.token, entry) for entry in completion.logprobs[len(sent.logprobs) :]
            ]
            offset = len(prompt_text) + sum(len(self._head.tokens.text(e.token)) for e in sent.logprobs)
            if begin and self._echo and output.prompt_logprobs is not None:
                entries = [*zip(output.prompt_tokens, output.prompt_logprobs, strict=True), *entries]
                offset = 0
            logprobs = self._head.completion_logprobs(entries, offset)
        return {
            "index": prompt_index * params.n + completion.index,
            "text": prompt_text + text if begin else text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
