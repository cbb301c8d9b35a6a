"""One endpoint, as a value."""

import dataclasses
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from .schema import RequestBody


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An endpoint.

    Attributes:
        path: Its path.
        endpoint: Answers requests. The first line of its docstring is its description.
        methods: GET, POST.
        body: What a POST sends; None for nothing.
        group: Its heading in `/docs`.
    """

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    methods: tuple[str, ...] = ("GET",)
    body: type[RequestBody] | None = None
    group: str = "About the server"
