"""The ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .connection import json_response
from .errors import ApiError
from .gate import Gate
from .routes import ENDPOINTS
from .service import Service

ROUTES = [Route(e.path, e.endpoint, methods=list(e.methods)) for e in ENDPOINTS]


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
        middleware=[*_cors(service.options.allowed_origins), Middleware(Gate, service=service)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _cors(origins: str | None) -> list[Middleware]:
    """Answers browsers that ask whether a page of another origin may call."""
    if origins is None:
        return []
    allowed = [origin.strip() for origin in origins.split(",")]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


async def _api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return json_response(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    reason = {
        404: f"no such endpoint: {request.url.path}; /docs lists them",
        405: f"method {request.method} not allowed for {request.url.path}; /docs lists the methods",
    }.get(error.status_code, error.detail)
    return json_response(ApiError(error.status_code, reason).body(), error.status_code, dict(error.headers or {}))


async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone; the access log shows it
