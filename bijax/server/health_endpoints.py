"""Health and metrics of a server."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from bijax.serving import SamplingParams

from .connection import json_response, while_connected
from .endpoints import service
from .errors import ApiError
from .prompts import Prompt

GENERATE_TIMEOUT_S = 20.0


async def health(request: Request) -> Response:
    """200 if the server takes requests, 503 while it starts or drains."""
    service(request).generation()
    return json_response({"status": "ready"})


async def health_generate(request: Request) -> Response:
    """200 if the engine has just sampled a token; 503 if it has not within 20 seconds."""
    generation = service(request).generation()
    prompt = Prompt([0], SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True), "prompt")
    try:
        async with asyncio.timeout(GENERATE_TIMEOUT_S):
            await while_connected(request.receive, generation.finish([prompt], [[0]]))
    except TimeoutError:
        raise ApiError(503, f"the engine sampled no token within {GENERATE_TIMEOUT_S:g} seconds") from None
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(service(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
