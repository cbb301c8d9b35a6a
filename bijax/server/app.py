"""The ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .connection import json_response
from .control_endpoints import (
    abort_request,
    continue_generation,
    flush_cache,
    get_model_info,
    get_server_info,
    pause_generation,
    update_weights_from_disk,
)
from .errors import ApiError
from .gate import Gate
from .generate_endpoint import generate
from .health_endpoints import health, health_generate, metrics
from .openai_endpoints import chat_completions, completions, models
from .service import Service

ROUTES = [
    Route("/generate", generate, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
    Route("/abort_request", abort_request, methods=["POST"]),
    Route("/pause_generation", pause_generation, methods=["POST"]),
    Route("/continue_generation", continue_generation, methods=["POST"]),
    Route("/update_weights_from_disk", update_weights_from_disk, methods=["POST"]),
    Route("/get_model_info", get_model_info, methods=["GET"]),
    Route("/get_server_info", get_server_info, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/health_generate", health_generate, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]


def create_app(service: Service) -> Starlette:
    """Builds the application.

    It listens while the engine starts, and answers 503 until then.

    Args:
        service: What is served.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await service.close()

    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(Gate, service=service)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return json_response(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    reason = {
        404: f"there is no {request.url.path} here",
        405: f"{request.method} is not what {request.url.path} takes",
    }.get(error.status_code, error.detail)
    return json_response(ApiError(error.status_code, reason).body(), error.status_code, dict(error.headers or {}))


async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the access log shows it
