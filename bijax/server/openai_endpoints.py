"""OpenAI's `/v1/completions` and `/v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bijax.serving import RequestOutput

from .adapters import find_adapter, with_adapter
from .chat_reply import ChatStream, chat_reply
from .completion_reply import CompletionReply
from .connection import json_response, while_connected
from .endpoints import admitted, body, event_stream, service
from .generation import Generation
from .openai_reply import ReplyHead
from .openai_request import ChatBody, CompletionBody
from .prompts import Prompt


async def completions(request: Request) -> Response:
    """Completes texts or token ids."""
    parsed = await body(request, CompletionBody)
    adapter = find_adapter(service(request).model, parsed.model, parsed.lora_path)
    head, usage = reply_head(request, adapter, "cmpl-"), parsed.include_usage()
    prompts = with_adapter(parsed.prompts(), adapter)
    generation, tokens = await admitted(request, prompts)
    reply = CompletionReply(head, prompts, echo=bool(parsed.echo))
    if parsed.stream:
        return await event_stream(request, _events(generation, prompts, tokens, reply, usage))
    return json_response(reply.reply(await while_connected(request.receive, generation.finish(prompts, tokens))))


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    parsed = await body(request, ChatBody)
    here = service(request)
    adapter = find_adapter(here.model, parsed.model, parsed.lora_path)
    head, usage = reply_head(request, adapter, "chatcmpl-"), parsed.include_usage()
    longest = here.model.max_model_len
    template = getattr(here.model.tokenizer, "chat_template", None)
    prompts = with_adapter(parsed.prompts(min(longest, here.options.max_output_tokens or longest), template), adapter)
    generation, tokens = await admitted(request, prompts)
    if parsed.stream:
        stream = ChatStream(head, prompts[0])
        return await event_stream(request, _events(generation, prompts, tokens, stream, usage))
    [output] = await while_connected(request.receive, generation.finish(prompts, tokens))
    return json_response(chat_reply(head, prompts[0], output))


def reply_head(request: Request, adapter: str | None, prefix: str) -> ReplyHead:
    """The fields of every reply to a request.

    Args:
        request: The request.
        adapter: The adapter that it asks for.
        prefix: Of its id.
    """
    here = service(request)
    id_ = f"{prefix}{request.state.request_id}"
    return ReplyHead(id_, int(time.time()), adapter or here.model.name, here.tokens, here.system_fingerprint)


async def _events(
    generation: Generation,
    prompts: Sequence[Prompt],
    tokens: list[list[int]],
    reply: CompletionReply | ChatStream,
    usage: bool,
) -> AsyncGenerator[dict[str, Any]]:
    last: dict[int, RequestOutput] = {}
    # Where the usage is asked for, all events have the member, null but in the last.
    more = {"usage": None} if usage else {}
    async with aclosing(generation.stream(prompts, tokens)) as outputs:
        async for index, output in outputs:
            last[index] = output
            for event in reply.events(index, output):
                yield event | more
    if usage:
        yield reply.usage(list(last.values()))
