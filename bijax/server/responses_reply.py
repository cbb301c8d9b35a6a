"""Replies and events of `/v1/responses`."""

from collections.abc import Iterator
from typing import Any

from bijax.serving import Completion, RequestOutput

from .openai_reply import ReplyHead
from .responses_request import ResponsesBody


class ResponsesReply:
    """Writes the reply, or cuts a growing output into the events of a stream.

    Args:
        head: Id, time and model.
        body: The request.
        max_new_tokens: Its limit.
    """

    def __init__(self, head: ReplyHead, body: ResponsesBody, max_new_tokens: int) -> None:
        self._head = head
        self._body = body
        self._max_new_tokens = max_new_tokens
        self._item_id = f"msg_{head.id.partition('_')[2]}"
        self._number = 0
        self._sent = ""

    def reply(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response; None for one that has just begun."""
        completion = None if output is None else output.completions[0]
        cut_off = completion is not None and completion.finish_reason != "stop"
        reason = "max_output_tokens" if completion is not None and completion.finish_reason == "length" else "aborted"
        status = "in_progress" if completion is None else "incomplete" if cut_off else "completed"
        body = self._body
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "seed": None if completion is None else completion.seed,
            "output": [] if completion is None else [self._item(completion, status)],
            "usage": None if output is None else self._usage(output),
            "error": None,
            "incomplete_details": {"reason": reason} if cut_off else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": self._max_new_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": self._format()},
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first text."""
        yield self._event("response.created", response=self.reply(None))
        yield self._event("response.in_progress", response=self.reply(None))
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._part("response.content_part.added", part=part)

    def events(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for the new part of the output, and those at its end."""
        completion = output.completions[0]
        text = completion.text or ""
        if len(text) > len(self._sent):
            yield self._part("response.output_text.delta", delta=text[len(self._sent) :], logprobs=[])
            self._sent = text
        if completion.finish_reason is None:
            return
        whole = self.reply(output)
        part = whole["output"][0]["content"][0]
        yield self._part("response.output_text.done", text=text, logprobs=part["logprobs"])
        yield self._part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _item(self, completion: Completion, status: str) -> dict[str, Any]:
        logprobs = self._head.chat_logprobs(completion.logprobs)["content"] if self._body.include else []
        part = {"type": "output_text", "text": completion.text or "", "annotations": [], "logprobs": logprobs}
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        prompt, new = len(output.prompt_tokens), len(output.completions[0].tokens)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        }

    def _format(self) -> dict[str, Any]:
        wanted_format = None if self._body.text is None else self._body.text.format
        if wanted_format is None or wanted_format.json_schema is None:
            return {"type": "text" if wanted_format is None else wanted_format.type}
        return {"type": wanted_format.type, "name": "schema", "schema": wanted_format.json_schema, "strict": True}

    def _part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event
