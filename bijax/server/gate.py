"""Middleware of every request: request id, API key, admission, access log."""

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import json_response
from .errors import ApiError
from .service import Service

log = logging.getLogger("bijax.server.access")

# For load balancers, monitors and browsers: no key, and always a place.
OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/health", "/ping", "/metrics"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Middleware around the application.

    Each reply carries `X-Request-Id`: the client's, if it is at most 128 printable characters, or a new one.

    Args:
        app: The application.
        service: Has the key and the limits, and counts the requests.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._options = service.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        counted = scope["path"] not in OPEN_PATHS
        self._service.num_open += counted
        try:
            refused = self._refused(scope, headers)
            if refused is None:
                await self._app(scope, receive, named_send)
            else:
                reply = json_response(refused.body(), refused.status, refused.headers())
                await reply(scope, receive, named_send)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"], extra={"request_id": request_id})
            if status:
                raise  # a started reply cannot be ended cleanly: the connection is closed
            reply = json_response(ApiError(500, f"an error of the server: {type(error).__name__}").body(), 500)
            await reply(scope, receive, named_send)
        finally:
            self._service.num_open -= counted
            log.info(
                "%s %s %s",
                scope["method"],
                scope["path"],
                status or "no reply",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "duration_s": round(time.monotonic() - begin, 6),
                },
            )

    def _refused(self, scope: Scope, headers: Headers) -> ApiError | None:
        limit = self._options.max_header_bytes
        if len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in headers.raw) > limit:
            return ApiError(431, f"the head of the request must have at most {limit} bytes")
        if scope["path"] in OPEN_PATHS:
            return None
        key = self._options.api_key
        if key is not None:
            given = headers.get("authorization", "").partition(" ")
            if given[0].lower() != "bearer" or not hmac.compare_digest(given[2].strip().encode(), key.encode()):
                return ApiError(401, "the header must be `Authorization: Bearer KEY` with the key of this server")
        if self._service.num_open > self._options.max_open_requests:
            return ApiError(
                503,
                f"{self._options.max_open_requests} requests are open, no more are taken now",
                retry_after_s=self._options.retry_after,
            )
        return None
