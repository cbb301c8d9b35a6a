"""What replies of OpenAI's two endpoints share."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from bijax.serving import RequestOutput, TokenLogprob

from .token_text import TokenText, json_logprob


@dataclasses.dataclass(frozen=True)
class ReplyHead:
    """What stands in every reply and event of a request.

    Attributes:
        id: Of the request.
        created: When it came, in seconds since 1970.
        model: Name of the model.
        tokens: Texts of tokens.
    """

    id: str
    created: int
    model: str
    tokens: TokenText

    def reply(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A reply or an event.

        Args:
            kind: The value of `object`.
            choices: The value of `choices`.
            more: Other members.
        """
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more
        }  # fmt: skip

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """The number of tokens of the request."""
        outputs = list(outputs)
        prompt = sum(len(output.prompt_tokens) for output in outputs)
        completion = sum(len(completion.tokens) for output in outputs for completion in output.completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        }

    def chat_logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of `/v1/chat/completions`."""

        def item(token: int, logprob: float) -> dict[str, Any]:
            return {
                "token": self.tokens.text(token),
                "logprob": json_logprob(logprob),
                "bytes": self.tokens.bytes(token),
            }

        return {
            "content": [
                item(entry.token, entry.logprob)
                | {"top_logprobs": [item(token, logprob) for logprob, token in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def completion_logprobs(self, entries: Iterable[tuple[int, TokenLogprob | None]], offset: int) -> dict[str, Any]:
        """`logprobs` of `/v1/completions`.

        Args:
            entries: Tokens with their log-probabilities; None for the first token of a prompt.
            offset: Where in the text the first of them begins.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for token, entry in entries:
            tokens.append(self.tokens.text(token))
            offsets.append(offset)
            offset += len(tokens[-1])
            logprobs.append(None if entry is None else json_logprob(entry.logprob))
            # Different tokens may have one text; the more probable one keeps it.
            best = {} if entry is None else {self.tokens.text(t): json_logprob(p) for p, t in reversed(entry.top)}
            top.append(best or None)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}
