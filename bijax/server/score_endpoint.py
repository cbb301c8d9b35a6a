"""`/v1/score`: log-likelihoods of texts after a text, and probabilities of labels as SGLang's endpoint gives them."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from bijax.serving import RequestOutput, SamplingParams

from .adapters import find_adapter, with_adapter
from .connection import json_response, while_connected
from .endpoints import admitted, body, service
from .errors import ApiError
from .neutral import SCORE, Neutral
from .prompts import Prompt, encoded
from .schema import OneOrMany, OneOrManyTokenIds, RequestBody, TokenIds
from .service import Service
from .token_text import json_logprob


class Score(RequestBody):
    """`/v1/score`. Query and items are texts or token ids, as SGLang's."""

    neutral: ClassVar[Neutral] = SCORE

    model: str | None = None
    lora_path: str | None = None
    query: str | TokenIds
    items: OneOrMany[str] | OneOrManyTokenIds
    label_token_ids: TokenIds | None = None
    apply_softmax: bool = False
    item_first: bool = False


async def score(request: Request) -> Response:
    """The log-likelihood of each item after a query; or the probability of each of `label_token_ids` after both."""
    parsed, here = await body(request, Score), service(request)
    adapter = find_adapter(here.model, parsed.model, parsed.lora_path)
    pairs = [
        (item, query) if parsed.item_first else (query, item)
        for query in [_tokens(here, parsed.query, "query")]
        for item in _items(here, parsed.items)
    ]
    labels = parsed.label_token_ids
    if labels is None:
        if parsed.item_first or parsed.apply_softmax:
            raise ApiError(400, "only allowed together with label_token_ids", field="item_first" if parsed.item_first
                           else "apply_softmax")  # fmt: skip
        scored = [(before + after, len(before)) for before, after in pairs]
    else:
        if not labels:
            raise ApiError(400, "must have at least one token, got none", field="label_token_ids")
        scored = [([*before, *after, label], len(before) + len(after)) for before, after in pairs for label in labels]
    for tokens, start in scored:
        if start == 0:
            raise ApiError(400, "the text before what is scored has no tokens; give at least one", field="query")
        if start == len(tokens):
            raise ApiError(400, "an item has no tokens; give at least one", field="items")
    prompts = [Prompt(tokens, _scoring(start), "items" if labels is None else "label_token_ids")
               for tokens, start in scored]  # fmt: skip
    prompts = with_adapter(prompts, adapter)
    generation, admitted_tokens = await admitted(request, prompts)
    outputs = await while_connected(request.receive, generation.finish(prompts, admitted_tokens))
    total = sum(len(output.prompt_tokens) for output in outputs)
    found = [_logprobs(output) for output in outputs]
    reply: dict[str, Any] = {
        "object": "scoring",
        "model": adapter or here.model.name,
        "system_fingerprint": here.system_fingerprint,
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }
    if labels is None:
        # Sums in float64, from left to right: they depend on the item alone.
        reply["scores"] = [json_logprob(sum(row)) for row in found]
        reply["token_logprobs"] = [[json_logprob(value) for value in row] for row in found]
    else:
        rows = [[row[0] for row in found[i : i + len(labels)]] for i in range(0, len(found), len(labels))]
        reply["scores"] = [_probabilities(row, softmax=parsed.apply_softmax) for row in rows]
    return json_response(reply)


def _scoring(start: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=0, prompt_logprobs=True, logprob_start_len=start)


def _logprobs(output: RequestOutput) -> list[float]:
    return [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]


def _probabilities(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    values = np.exp(np.array(logprobs, np.float64))
    if softmax:
        values = np.exp(np.array(logprobs, np.float64) - max(logprobs))
        values = values / math.fsum(values)
    return [float(value) for value in values]


def _items(here: Service, items: object) -> list[list[int]]:
    many = items if isinstance(items, list) and not all(isinstance(item, int) for item in items) else [items]
    if not many or not items:
        raise ApiError(400, "must have at least one item, got none", field="items")
    return [_tokens(here, item, f"items.{i}") for i, item in enumerate(many)]


def _tokens(here: Service, given: object, field: str) -> list[int]:
    if isinstance(given, str):
        text = given
        return encoded(lambda: here.model.text(field).encode(text), field)
    return list(given) if isinstance(given, list) else []
