"""Shared code of the endpoints."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .connection import EventStream, read_body, while_connected
from .errors import ApiError
from .generation import Generation
from .prompts import Prompt, tokenize
from .schema import RequestBody, parse
from .service import Service


def service(request: Request) -> Service:
    """The server that a request came to."""
    return request.app.state.service


async def body[Body: RequestBody](request: Request, kind: type[Body]) -> Body:
    """The body of a request.

    Raises:
        ApiError: If it is not of this kind, too long or too slow.
    """
    options = service(request).options
    return parse(kind, await read_body(request, max_bytes=options.max_request_bytes, timeout_s=options.body_timeout))


async def admitted(request: Request, prompts: Sequence[Prompt]) -> tuple[Generation, list[list[int]]]:
    """Checks prompts against the limits.

    Returns:
        The engine that runs them, and their tokens.

    Raises:
        ApiError: If the server is not ready, or a limit is passed.
    """
    here = service(request)
    generation = here.generation()
    outputs = sum(prompt.params.n for prompt in prompts)
    if outputs > here.options.max_prompts:
        most = max(prompts, key=lambda prompt: prompt.params.n)
        field = most.names("n") if most.params.n > 1 else most.field.partition(".")[0]
        raise ApiError(400, f"the request asks for {outputs} outputs (prompts times n), at most"
                       f" {here.options.max_prompts} are taken", field=field)  # fmt: skip
    longest = max(prompts, key=lambda prompt: prompt.params.max_new_tokens)
    limit = here.options.max_output_tokens
    if limit is not None and longest.params.max_new_tokens > limit:
        raise ApiError(400, f"the request asks for outputs of {longest.params.max_new_tokens} tokens, at most {limit}"
                       " are taken", field=longest.names("max_new_tokens"))  # fmt: skip
    return generation, await tokenize(
        prompts,
        here.model,
        max_prompt_tokens=here.options.max_prompt_tokens,
        unknown_token_id=here.options.unknown_token_id,
    )


async def event_stream(request: Request, events: AsyncGenerator[dict[str, Any]], *, named: bool = False) -> Response:
    """A stream of events. An error before the first event is answered with a status.

    Raises:
        ApiError: If there is an error before the first event.
    """

    async def begin() -> dict[str, Any]:
        return await anext(events)

    try:
        first = await while_connected(request.receive, begin())
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, named=named)
