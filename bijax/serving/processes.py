"""An engine over the devices of several processes: process 0 decides, and the others do the same."""

import dataclasses
import secrets
import threading
from collections.abc import Callable, Container, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from bijax.serving.engine import Engine
from bijax.serving.errors import EngineError
from bijax.serving.outputs import RequestOutput
from bijax.serving.params import SamplingParams
from bijax.serving.sequence import random_seed

_KEY_BYTES: Final = 32
_CLOSE: Final = "close"


class LeadingEngine(Engine):
    """The engine of process 0, whose calls the engines of all other processes repeat.

    A program over the devices of several processes runs when each of them calls it. So every process has an engine with
    the same model, options and requests, and makes the same steps; what is sampled is on all devices, and each reads it
    by itself. Clients connect to process 0 only.

    Args:
        followers: A connection to each other process, as `connect` returns them.
        model: As for `Engine`, cut over a mesh of the devices of all processes.
        **others: The other arguments of `Engine`.

    Raises:
        TypeError: As `Engine`.
        ValueError: As `Engine`.

    Guarantee: as `Engine`.
    """

    def __init__(self, followers: Sequence[Connection], model: Any, **others: Any) -> None:
        super().__init__(model, **others)
        self._followers = list(followers)

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        """Starts a thread for each other process that calls `on_lost` with its number, and why, if it ends."""
        for number, follower in enumerate(self._followers, 1):
            given = (number, follower, on_lost)
            threading.Thread(target=self._watch, args=given, name=f"bijax-process-{number}", daemon=True).start()

    def _watch(self, number: int, follower: Connection, on_lost: Callable[[int, str], None]) -> None:
        try:
            why = str(follower.recv())
        except (EOFError, OSError):
            why = "it ended"
        if self._followers:
            on_lost(number, why)

    def dismiss(self) -> None:
        """Ends the other processes' part. The engine must not be used any more."""
        followers, self._followers = self._followers, []
        for follower in followers:
            _send(follower, _CLOSE)

    def add(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request; see `Engine.add`."""
        params = SamplingParams() if params is None else params
        fixed = self.options.default_seed is not None or self.options.seed_from_prompt
        if isinstance(params, SamplingParams) and params.seed is None and not fixed:
            params = dataclasses.replace(params, seed=random_seed())  # the same in all processes
        name = super().add(prompt_tokens, params, request_id=request_id, priority=priority)
        # Sent after it was accepted here: what is refused changes no engine.
        self._tell("add", list(prompt_tokens), params, request_id=name, priority=priority)
        return name

    def step(self, watched: Container[str] | None = None) -> list[RequestOutput]:
        """Dispatches one step; see `Engine.step`."""
        self._tell("step", ())
        return super().step(watched)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; see `Engine.abort`."""
        self._tell("abort", request_id)
        return super().abort(request_id)

    def pause(self) -> None:
        """Makes steps dispatch nothing until `resume`."""
        self._tell("pause")
        super().pause()

    def resume(self) -> None:
        """Ends a pause."""
        self._tell("resume")
        super().resume()

    def flush_cache(self) -> None:
        """Empties the prefix cache."""
        self._tell("flush_cache")
        super().flush_cache()

    def update_weights(self, weights: Any, version: str | None = None) -> None:
        """Refuses new weights, which each process would have to read.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "LeadingEngine: weights cannot be updated over several processes; start the server again with the new ones."
        )

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles all programs; see `Engine.warm_up`."""
        self._tell("warm_up")
        super().warm_up(on_progress)

    def _tell(self, name: str, *arguments: Any, **options: Any) -> None:
        for follower in self._followers:
            _send(follower, (name, arguments, options))


def follow(engine: Engine, leader: Connection) -> None:
    """Repeats the calls of process 0 until it says that it ends.

    Args:
        engine: With the same model and options as the `LeadingEngine`.
        leader: What `connect` returned.

    Raises:
        EngineError: If process 0 is lost.
        Exception: What a call raises; process 0 is notified.
    """
    while True:
        try:
            message = leader.recv()
        except (EOFError, OSError) as error:
            raise EngineError("process 0, which this one follows, ended.") from error
        if message == _CLOSE:
            return
        name, arguments, options = message
        try:
            getattr(engine, name)(*arguments, **options)
        except Exception as error:
            _send(leader, f"{type(error).__name__}: {error}")
            raise


def connect(host: str) -> list[Connection]:
    """Connects process 0 with all others of `jax.distributed`. Each process calls it.

    The port and a random key travel through a collective operation, so that no other process can connect.

    Args:
        host: Address of process 0.

    Returns:
        In process 0 a connection to each other process, in their order; elsewhere the one to process 0.

    Raises:
        OSError: If there is no such address, or it cannot be reached.
    """
    if jax.process_index() == 0:
        key = secrets.token_bytes(_KEY_BYTES)
        with Listener((host, 0), backlog=jax.process_count(), authkey=key) as listener:
            port: Any = listener.address
            _shared(key + int(port[1]).to_bytes(4, "little"))
            found: dict[int, Connection] = {}
            while len(found) < jax.process_count() - 1:
                try:
                    connection = listener.accept()
                except AuthenticationError:  # another program
                    continue
                found[connection.recv()] = connection
        return [found[number] for number in sorted(found)]
    shared = _shared(bytes(_KEY_BYTES + 4))
    leader: Any = Client((host, int.from_bytes(shared[_KEY_BYTES:], "little")), authkey=shared[:_KEY_BYTES])
    leader.send(jax.process_index())
    return [leader]


def smallest_of_all(number: int) -> int:
    """Returns the smallest of the numbers that the processes pass; each calls it."""
    return int(np.min(multihost_utils.process_allgather(np.array(number))))


def _shared(own: bytes) -> bytes:
    """Returns what process 0 passes."""
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))).astype(np.uint8))


def _send(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except OSError:
        return  # the next read from it raises
