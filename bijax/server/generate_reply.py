"""Replies of SGLang's `/generate`."""

from collections.abc import Iterable
from typing import Any

from bijax.serving import Completion, RequestOutput, TokenLogprob

from .generate_request import GenerateBody
from .prompts import Prompt
from .token_text import TokenText, json_logprob


class GenerateReply:
    """Writes the replies to one request.

    Args:
        body: The request.
        tokens: Texts of tokens.
    """

    def __init__(self, body: GenerateBody, tokens: TokenText) -> None:
        self._with_text = body.return_text_in_logprobs
        self._tokens = tokens

    def items(self, prompt: Prompt, output: RequestOutput, elapsed_s: float) -> list[dict[str, Any]]:
        """One item for each sample of a prompt, with all that it has got so far.

        Args:
            prompt: The prompt.
            output: Its output, finished or not.
            elapsed_s: Seconds since the request came.
        """
        return [self._item(prompt, output, completion, elapsed_s) for completion in output.completions]

    def _item(self, prompt: Prompt, output: RequestOutput, completion: Completion, elapsed_s: float) -> dict[str, Any]:
        info: dict[str, Any] = {
            "id": prompt.rid or output.request_id,
            "finish_reason": _finish_reason(completion),
            "prompt_tokens": len(output.prompt_tokens),
            "completion_tokens": len(completion.tokens),
            "cached_tokens": output.cached_tokens,
            "weight_version": output.weight_version,
            "sampling_seed": completion.seed,
            "e2e_latency": elapsed_s,
        }
        if prompt.params.logprobs:
            # As SGLang has it, the first entry is null wherever the log-probabilities start.
            scored = [] if output.prompt_logprobs is None else [None, *output.prompt_logprobs[1:]]
            ids = output.prompt_tokens[len(output.prompt_tokens) - len(scored) :]
            info["input_token_logprobs"] = [self._entry(entry, id_) for entry, id_ in zip(scored, ids, strict=True)]
            info["output_token_logprobs"] = [self._entry(entry, entry.token) for entry in completion.logprobs]
            if prompt.params.top_logprobs:
                info["input_top_logprobs"] = self._top(scored)
                info["output_top_logprobs"] = self._top(completion.logprobs)
        return {"text": completion.text, "output_ids": list(completion.tokens), "meta_info": info}

    def _entry(self, entry: TokenLogprob | None, token: int) -> list[Any]:
        return self._triple(None if entry is None else json_logprob(entry.logprob), token)

    def _top(self, entries: Iterable[TokenLogprob | None]) -> list[list[list[Any]] | None]:
        return [
            None if entry is None else [self._triple(json_logprob(logprob), token) for logprob, token in entry.top]
            for entry in entries
        ]

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, self._tokens.text(token) if self._with_text else None]


def _finish_reason(completion: Completion) -> dict[str, Any] | None:
    match completion.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(completion.tokens)}
        case "stop":
            return {"type": "stop", "matched": completion.stop_reason}
        case "abort":
            return {"type": "abort", "message": str(completion.stop_reason or "the request was aborted")}
