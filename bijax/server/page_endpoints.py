"""The pages that the server shows, and the OpenAPI document."""

import functools
import importlib.resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from .connection import json_response
from .info_endpoints import server_version
from .openapi import docs_page, openapi


async def playground(request: Request) -> Response:
    """A page to try the model, and to see that its bits depend on the request alone."""
    return HTMLResponse(_page())


async def openapi_json(request: Request) -> Response:
    """This description, as OpenAPI."""
    return json_response(_document())


async def docs(request: Request) -> Response:
    """A page that lists the endpoints and their fields."""
    return HTMLResponse(docs_page(_document()))


@functools.cache
def _page() -> bytes:
    return importlib.resources.files(__package__).joinpath("page.html").read_bytes()


@functools.cache
def _document() -> dict[str, Any]:
    # Here, because the list names the functions of this file.
    from .routes import ENDPOINTS

    return openapi(ENDPOINTS, server_version())
