"""SGLang's `/generate`."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .connection import json_response, while_connected
from .endpoints import admitted, body, event_stream, service
from .generate_reply import GenerateReply
from .generate_request import GenerateBody
from .generation import Generation
from .prompts import Prompt


async def generate(request: Request) -> Response:
    """Completes prompts. A list of prompts, or `n` above 1, is answered with a list."""
    begin = time.monotonic()
    parsed = await body(request, GenerateBody)
    prompts = parsed.prompts(service(request).model)
    generation, tokens = await admitted(request, prompts)
    reply = GenerateReply(parsed, service(request).tokens)
    if parsed.stream:
        return await event_stream(request, _events(generation, prompts, tokens, reply, begin))
    outputs = await while_connected(request.receive, generation.finish(prompts, tokens))
    elapsed = time.monotonic() - begin
    items = [i for pair in zip(prompts, outputs, strict=True) for i in reply.items(*pair, elapsed)]
    is_list = parsed.sources()[0] or len(items) > 1
    return json_response(items if is_list else items[0])


async def _events(
    generation: Generation, prompts: Sequence[Prompt], tokens: list[list[int]], reply: GenerateReply, begin: float
) -> AsyncGenerator[dict[str, Any]]:
    # One event for each sample, with its place in the list that the reply would be.
    places = [sum(prompt.params.n for prompt in prompts[:index]) for index in range(len(prompts))]
    async with aclosing(generation.stream(prompts, tokens)) as outputs:
        async for index, output in outputs:
            for sample, item in enumerate(reply.items(prompts[index], output, time.monotonic() - begin)):
                yield item | {"index": places[index] + sample}
