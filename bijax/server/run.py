"""Serves until a signal arrives."""

import asyncio
import socket
from types import FrameType

import uvicorn

from .app import create_app
from .service import Phase, Service

BACKLOG = 2048


class Server(uvicorn.Server):
    """Listens on a socket, and drains before it stops.

    While it drains it still accepts connections, so that `/health` can say so to a load balancer. A second signal
    stops it at once.

    Args:
        service: What is served.
    """

    def __init__(self, service: Service) -> None:
        options = service.options
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,  # the gate writes one with the request's id
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=options.max_header_bytes,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes SIGTERM and SIGINT."""
        if self._loop is None or self._service.phase is Phase.DRAINING:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Takes no more requests; stops when those that run are finished."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Looks, ten times a second, whether to stop."""
        if self._service.phase is Phase.FAILED:
            self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Opens the socket, before the model is loaded. Clients that connect early wait.

    Raises:
        OSError: If the address is in use or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def serve(service: Service, listener: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns:
        0, or 1 if the engine did not start.
    """
    Server(service).run(sockets=[listener])
    return 1 if service.phase is Phase.FAILED else 0
