"""Replies and events of `/v1/chat/completions`."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bijax.serving import Completion, RequestOutput

from .openai_reply import ReplyHead
from .prompts import Conversation, Prompt
from .tools import split_calls, sure_text


def chat_reply(head: ReplyHead, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """The reply, once the output is finished."""
    choices = []
    for completion in output.completions:
        text, calls = _split(head, prompt, completion)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": head.chat_logprobs(completion.logprobs) if prompt.params.logprobs else None,
                "finish_reason": "tool_calls" if calls else completion.finish_reason,
                "seed": completion.seed,
            }
        )
    return head.reply("chat.completion", choices, usage=head.usage([output]))


def _split(head: ReplyHead, prompt: Prompt, completion: Completion) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls of an answer."""
    text = completion.text or ""
    if not _has_tools(prompt):
        return text, []
    return split_calls(text, f"call_{head.id.partition('-')[2]}_{completion.index}")


def _has_tools(prompt: Prompt) -> bool:
    return isinstance(prompt.source, Conversation) and prompt.source.tools is not None


class ChatStream:
    """Cuts growing outputs into the events of a stream."""

    def __init__(self, head: ReplyHead, prompt: Prompt) -> None:
        self._head = head
        self._prompt = prompt
        self._logprobs = prompt.params.logprobs
        self._num_characters: defaultdict[int, int] = defaultdict(int)
        self._sent: dict[int, Completion] = {}

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for the new part of an output. A choice begins with its role and ends with its finish reason."""
        for completion in output.completions:
            index, sent = completion.index, self._sent.get(completion.index)
            if sent is None:
                yield self._event(index, {"role": "assistant", "content": ""}, None, None)
                sent = Completion(index, (), "")
            finished = completion.finish_reason is not None
            shown, calls = _split(self._head, self._prompt, completion) if finished else (completion.text or "", [])
            if not finished and _has_tools(self._prompt):
                shown = sure_text(shown)
            text = shown[self._num_characters[index] :]
            self._num_characters[index] += len(text)
            logprobs = completion.logprobs[len(sent.logprobs) :]
            if text or logprobs:
                yield self._event(
                    index, {"content": text}, self._head.chat_logprobs(logprobs) if self._logprobs else None, None
                )
            if finished and sent.finish_reason is None:
                for place, call in enumerate(calls):
                    yield self._event(index, {"tool_calls": [{"index": place} | call]}, None, None)
                reason = "tool_calls" if calls else completion.finish_reason
                yield self._event(index, {}, None, reason, {"seed": completion.seed})
            self._sent[index] = completion

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(more or {})}
        return self._head.reply("chat.completion.chunk", [choice])

    def usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The event about the number of tokens."""
        return self._head.reply("chat.completion.chunk", [], usage=self._head.usage(outputs))
