"""OpenAI's `/v1/embeddings`."""

import base64
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from bijax.serving import RequestOutput, SamplingParams

from .adapters import find_adapter, with_adapter
from .connection import json_response, while_connected
from .endpoints import admitted, body, service
from .neutral import EMBEDDINGS, Neutral
from .openai_endpoints import reply_head
from .openai_request import prompts_of
from .prompts import Prompt
from .schema import RequestBody

_PARAMS = SamplingParams(max_new_tokens=0, embedding=True)


class Embeddings(RequestBody):
    """`/v1/embeddings`."""

    neutral: ClassVar[Neutral] = EMBEDDINGS

    model: str | None = None
    lora_path: str | None = None
    input: Annotated[list[str] | list[list[int]], PlainValidator(prompts_of)]
    encoding_format: Literal["float", "base64"] = "float"
    priority: int = 0


async def embeddings(request: Request) -> Response:
    """The hidden state after the last layer and norm at the last token of each text, with length 1."""
    parsed = await body(request, Embeddings)
    adapter = find_adapter(service(request).model, parsed.model, parsed.lora_path)
    head = reply_head(request, adapter, "embd-")
    prompts = with_adapter([Prompt(text, _PARAMS, "input", priority=parsed.priority) for text in parsed.input], adapter)
    generation, tokens = await admitted(request, prompts)
    outputs = await while_connected(request.receive, generation.finish(prompts, tokens))
    total = sum(len(output.prompt_tokens) for output in outputs)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output, parsed.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    reply: dict[str, Any] = {"object": "list", "data": data, "model": head.model}
    reply |= {"usage": {"prompt_tokens": total, "total_tokens": total}, "system_fingerprint": head.system_fingerprint}
    return json_response(reply)


def _encoded(output: RequestOutput, form: str) -> list[float] | str:
    # In float64 and rounded once, row by row: it depends on this text alone.
    row = np.array(output.embedding, np.float64)
    length = np.sqrt(np.sum(row * row))
    unit = (row / length if length > 0 else row).astype(np.float32)
    if form == "base64":
        return base64.b64encode(unit.astype("<f4").tobytes()).decode()
    return [float(value) for value in unit]
