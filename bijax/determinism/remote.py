"""Servers that answer instead of an engine of this process."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from bijax.determinism.command import DeterminismError
from bijax.serving import Completion, EngineOptions, RequestOutput, SamplingParams, TokenLogprob

_TIMEOUT_S = 600.0


class RemoteEngine:
    """A server of `bijax serve`, called over HTTP at its `/generate`.

    Args:
        url: Of the server, without a path.
        api_key: Its key, if it wants one.

    Attributes:
        options: Of its engine.
        max_request_tokens: Longest sequence, prompt and output together.
        vocab_size: Number of tokens.

    Raises:
        DeterminismError: If the server cannot be reached, refuses, or is not one of bijax.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        info = self._ask("/get_server_info")
        if not isinstance(info, dict) or "engine" not in info:
            raise DeterminismError(f"{self._url} does not tell the options of its engine: it is not a server of bijax")
        self.options = EngineOptions(**info["engine"])
        self.max_request_tokens: int = info["max_model_len"]
        self.vocab_size: int = info["vocab_size"]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return [token for _, token, _ in self._ask("/generate", body)["meta_info"]["input_token_logprobs"]]

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Returns the outputs of prompts that are sent together.

        Of the parameters, `temperature`, `seed`, `max_new_tokens`, `ignore_eos` and `logprobs` are sent.
        """
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "temperature": params.temperature,
                "sampling_seed": params.seed,
                "max_new_tokens": params.max_new_tokens,
                "ignore_eos": params.ignore_eos,
            },
            "return_logprob": params.logprobs,
        }
        items = self._ask("/generate", body)
        return [_output(prompt, item) for prompt, item in zip(prompts, items, strict=True)]

    def flush_cache(self) -> None:
        """Empties the prefix cache, once the server has answered all requests."""
        self._ask(f"/flush_cache?timeout={_TIMEOUT_S:g}", {})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
            raise DeterminismError(f"{self._url}{path} answers with status {error.code}: {reason}") from error
        except (OSError, ValueError) as error:  # no such server, or it does not speak HTTP and JSON
            raise DeterminismError(f"could not reach {self._url}{path}: {error}") from error


def _output(prompt: Sequence[int], item: dict[str, Any]) -> RequestOutput:
    found = item["meta_info"]
    logprobs = tuple(TokenLogprob(p, token) for p, token, _ in found.get("output_token_logprobs") or ())
    completion = Completion(0, tuple(item["output_ids"]), item["text"], logprobs, found["finish_reason"]["type"])
    return RequestOutput(found["id"], tuple(prompt), (completion,), True, cached_tokens=found["cached_tokens"])
