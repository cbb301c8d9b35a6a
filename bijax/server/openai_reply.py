"""Shared parts of the replies of OpenAI's two endpoints."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from bijax.serving import RequestOutput, TokenLogprob

from .token_text import TokenText, json_logprob


@dataclasses.dataclass(frozen=True)
class ReplyHead:
    """The fields of every reply and event of a request.

    Attributes:
        id: Of the request.
        created: When it came, in seconds since 1970.
        model: Name of the model.
        tokens: Texts of tokens.
        system_fingerprint: What fixes the bits: that of the contracts and the version of the weights.
    """

    id: str
    created: int
    model: str
    tokens: TokenText
    system_fingerprint: str | None = None

    def reply(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A reply or an event.

        Args:
            kind: The value of `object`.
            choices: The value of `choices`.
            more: Other members.
        """
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.system_fingerprint, "choices": choices, **more
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
                "token": self.tokens.name(token),
                "logprob": json_logprob(logprob),
                "bytes": self.tokens.byte_list(token),
            }

        return {
            "content": [
                item(entry.token, entry.logprob)
                | {"top_logprobs": [item(token, logprob) for logprob, token in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def completion_logprobs(self, entries: Iterable[tuple[int, TokenLogprob | None, int]]) -> dict[str, Any]:
        """`logprobs` of `/v1/completions`.

        Args:
            entries: Tokens with their log-probabilities, None for the first token of a prompt, and their places in the
                text.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for token, entry, offset in entries:
            tokens.append(self.tokens.name(token))
            offsets.append(offset)
            logprobs.append(None if entry is None else json_logprob(entry.logprob))
            top.append(None if entry is None else self._best(entry))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _best(self, entry: TokenLogprob) -> dict[str, float | None]:
        """The most probable tokens and the one at hand, by their texts.

        Different tokens may share a text. It goes to the current token, or else to the most probable one; the others
        get vLLM's name for tokens without a distinct text.
        """
        own = self.tokens.name(entry.token)
        best: dict[str, float | None] = {}
        for logprob, token in entry.top:
            if token == entry.token:
                best[own] = json_logprob(entry.logprob)
                continue
            name = self.tokens.name(token)
            best[f"token_id:{token}" if name == own or name in best else name] = json_logprob(logprob)
        best.setdefault(own, json_logprob(entry.logprob))
        return best
