"""OpenAI's `/v1/responses`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .adapters import find_adapter, with_adapter
from .connection import json_response, while_connected
from .endpoints import admitted, body, event_stream, service
from .generation import Generation
from .openai_endpoints import reply_head
from .prompts import Prompt
from .responses_reply import ResponsesReply
from .responses_request import ResponsesBody


async def responses(request: Request) -> Response:
    """Answers a conversation, in the form of OpenAI's newer API."""
    parsed = await body(request, ResponsesBody)
    here = service(request)
    adapter = find_adapter(here.model, parsed.model)
    head = reply_head(request, adapter, "resp_")
    longest = here.model.max_model_len
    [prompt] = with_adapter([parsed.prompt(min(longest, here.options.max_output_tokens or longest))], adapter)
    generation, tokens = await admitted(request, [prompt])
    reply = ResponsesReply(head, parsed, prompt.params.max_new_tokens)
    if parsed.stream:
        return await event_stream(request, _events(generation, prompt, tokens, reply), named=True)
    [output] = await while_connected(request.receive, generation.finish([prompt], tokens))
    return json_response(reply.reply(output))


async def _events(
    generation: Generation, prompt: Prompt, tokens: list[list[int]], reply: ResponsesReply
) -> AsyncGenerator[dict[str, Any]]:
    begun = False
    async with aclosing(generation.stream([prompt], tokens)) as outputs:
        async for _, output in outputs:
            if not begun:  # an error before the first token is answered with a status
                begun = True
                for event in reply.begin():
                    yield event
            for event in reply.events(output):
                yield event
