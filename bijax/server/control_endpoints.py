"""Endpoints that control a server: aborts, pauses, weights."""

import asyncio
import time
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from .connection import json_response
from .endpoints import body, service
from .errors import ApiError
from .schema import RequestBody

POLL_S = 0.02


class Abort(RequestBody):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


class Pause(RequestBody):
    """`/pause_generation`."""

    mode: Literal["in_place", "abort"] = "in_place"


class Nothing(RequestBody):
    """A body without fields."""


class Update(RequestBody):
    """`/update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


async def abort_request(request: Request) -> Response:
    """Ends the requests with a `rid`, or all; their replies hold the output so far."""
    parsed = await body(request, Abort)
    if (parsed.rid is None) == (not parsed.abort_all):
        raise ApiError(400, "give either a rid or abort_all=true", field="rid")
    aborted = await service(request).generation(draining=True).abort(parsed.rid)
    return json_response({"success": True, "num_aborted": aborted})


async def pause_generation(request: Request) -> Response:
    """Stops between two steps. Requests wait, or are aborted first, if `mode` is "abort"."""
    parsed = await body(request, Pause)
    generation = service(request).generation()
    if parsed.mode == "abort":
        await generation.abort(None)
    await generation.engine.pause()
    return json_response({"status": "paused"})


async def continue_generation(request: Request) -> Response:
    """Resumes generation after a pause."""
    await body(request, Nothing)
    await service(request).generation().engine.resume()
    return json_response({"status": "ok"})


async def flush_cache(request: Request) -> Response:
    """Clears the prefix cache. With `?timeout=S`, waits until no request runs, S seconds at most."""
    await body(request, Nothing)
    generation = service(request).generation()
    given = request.query_params.get("timeout", "0")
    try:
        timeout = float(given)
    except ValueError:
        timeout = -1.0
    if not 0 <= timeout <= 3600:
        raise ApiError(400, f"must be from 0 to 3600 seconds, got {given!r}", field="timeout")
    deadline = time.monotonic() + timeout
    while generation.num_running and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    await generation.engine.flush_cache()
    return json_response({"success": True, "message": "The cache is empty."})


async def update_weights_from_disk(request: Request) -> Response:
    """Loads new weights for the same model; the prefix cache is cleared."""
    parsed = await body(request, Update)
    here = service(request)
    generation = here.generation()
    if here.model.load_weights is None:
        raise ApiError(400, "this server does not load weights")
    version = parsed.weight_version or parsed.model_path
    try:
        weights = await asyncio.to_thread(here.model.load_weights, parsed.model_path)
        aborted = await generation.abort(None) if parsed.abort_all_requests else 0
        await generation.engine.update_weights(weights, version)
    except (OSError, TypeError, ValueError) as error:  # not there, not readable, or of another model
        raise ApiError(400, str(error), field="model_path") from error
    return json_response(
        {"success": True, "message": f"The weights are those of {parsed.model_path}.", "weight_version": version,
         "num_aborted": aborted}
    )  # fmt: skip
