"""Reading bodies and writing replies, with clients that may be slow or disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: With status 413 if it is too long, 408 if it does not arrive in time.
        ClientDisconnect: If the client disconnects.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_long(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_long(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} seconds") from None
    return bytes(body)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes")


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Waits for work, and cancels it when the client disconnects.

    Args:
        receive: Of the request, whose body was read.
        work: What to wait for.

    Raises:
        ClientDisconnect: If the client disconnects first.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_json(value: Any) -> bytes:
    """JSON in UTF-8. Floats keep all their digits; nan and infinities are an error."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A reply in JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


class EventStream(Response):
    """Server-sent events, each with JSON for data, and `[DONE]` at the end.

    An error becomes an event too, since the status is already sent. The events are closed when the client disconnects.

    Args:
        first: The first event.
        rest: The others.
        named: Whether each event has the name that its member `type` says, and none comes after the last.
    """

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]], *, named: bool = False) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._named = first, rest, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass  # the client has gone, nothing can be sent
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes, name: bytes = b"") -> None:
            await send({"type": "http.response.body", "body": name + b"data: " + data + b"\n\n", "more_body": True})

        async def event(value: dict[str, Any]) -> None:
            name = f"event: {value['type']}\n" if self._named and "type" in value else ""
            await write(to_json(value), name.encode())

        await event(self._first)
        try:
            async with aclosing(self._rest):
                async for value in self._rest:
                    await event(value)
        except ApiError as error:
            await event(error.body())
        except Exception as error:
            await event(ApiError(500, f"an error of the server: {type(error).__name__}").body())
            raise
        if not self._named:
            await write(b"[DONE]")
        await send({"type": "http.response.body", "body": b""})
