"""Replies and events of `/v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from bijax.serving import Completion, RequestOutput

from .openai_reply import ReplyHead
from .prompts import Prompt


def chat_reply(head: ReplyHead, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """The reply, once the output is finished."""
    choices = [
        {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": head.chat_logprobs(completion.logprobs) if prompt.params.logprobs else None,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
        }
        for completion in output.completions
    ]
    return head.reply("chat.completion", choices, usage=head.usage([output]))


class ChatStream:
    """Cuts growing outputs into the events of a stream."""

    def __init__(self, head: ReplyHead, prompt: Prompt) -> None:
        self._head = head
        self._logprobs = prompt.params.logprobs
        self._sent: dict[int, Completion] = {}

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for the new part of an output. A choice begins with its role and ends with its finish reason."""
        for completion in output.completions:
            index, sent = completion.index, self._sent.get(completion.index)
            if sent is None:
                yield self._event(index, {"role": "assistant", "content": ""}, None, None)
                sent = Completion(index, (), "")
            text = (completion.text or "")[len(sent.text or "") :]
            logprobs = completion.logprobs[len(sent.logprobs) :]
            if text or logprobs:
                yield self._event(
                    index, {"content": text}, self._head.chat_logprobs(logprobs) if self._logprobs else None, None
                )
            if completion.finish_reason is not None and sent.finish_reason is None:
                yield self._event(index, {}, None, completion.finish_reason)
            self._sent[index] = completion

    def _event(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.reply("chat.completion.chunk", [choice])

    def usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The event about the number of tokens."""
        return self._head.reply("chat.completion.chunk", [], usage=self._head.usage(outputs))
