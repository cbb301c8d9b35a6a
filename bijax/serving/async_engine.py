"""The engine for many clients: a thread computes, coroutines wait."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from bijax.serving.engine import Engine
from bijax.serving.errors import EngineError
from bijax.serving.outputs import EngineStats, RequestOutput
from bijax.serving.params import SamplingParams


class AsyncEngine:
    """Runs an `Engine` in its own thread, and hands its outputs to coroutines.

    The methods may be called from any event loop. Nothing else may use the engine meanwhile.

    Args:
        engine: The engine. Warm it up before.

    Guarantee: as `Engine`: bits do not depend on other clients or on timing.

    Example:
        >>> from bijax.serving.options import EngineOptions
        >>> from bijax.serving.toy import ToyModel
        >>> async def main() -> int:
        ...     engine = Engine(ToyModel.random(seed=0), options=EngineOptions(num_pages=32, max_running=2))
        ...     async with AsyncEngine(engine) as serving:
        ...         async for output in serving.stream([1, 2, 3], SamplingParams(max_new_tokens=4)):
        ...             tokens = output.completions[0].tokens
        ...     return len(tokens)
        >>> asyncio.run(main())
        4
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"AsyncEngine: engine must be an Engine, got {type(engine).__name__}.")
        self.engine = engine
        self._condition = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._streams: dict[str, _Mailbox] = {}
        self._watched: set[str] = set()
        self._names = itertools.count()
        self._draining = False
        self._closed = False
        self._error: BaseException | None = None
        self._stats = engine.stats()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="bijax-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None while it runs."""
        return self._error

    @property
    def draining(self) -> bool:
        """Whether requests are refused because the engine finishes the last ones."""
        return self._draining

    async def stream(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Serves a request; yields cumulative outputs as they arrive; a slow reader misses intermediate ones.

        Leaving the loop before the end aborts the request and frees its pages.

        Raises:
            TypeError: As `Engine.add`.
            ValueError: As `Engine.add`.
            QueueFullError: As `Engine.add`.
            EngineError: If the engine drains, is closed, or has failed.
        """
        async with aclosing(self._serve(prompt_tokens, params, request_id, priority, watched=True)) as outputs:
            async for output in outputs:
                yield output

    async def _serve(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        watched: bool,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the outputs of a request, or the last one alone."""
        if self._draining:
            raise EngineError("the engine is draining: it takes no more requests.")
        name = f"stream-{next(self._names)}" if request_id is None else request_id
        mailbox = _Mailbox(asyncio.get_running_loop())
        finished = False

        def add() -> None:
            self.engine.add(prompt_tokens, params, request_id=name, priority=priority)
            self._streams[name] = mailbox
            if watched:
                self._watched.add(name)

        adding = self._submit(add)
        try:
            await asyncio.wrap_future(adding)
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                # After `add` in the queue, so that a request which is just being added ends too.
                self._submit(lambda: self._leave(name, mailbox))

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Serves a request to its end; see `stream`."""
        last: RequestOutput | None = None
        async with aclosing(self._serve(prompt_tokens, params, request_id, priority, watched=False)) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise EngineError("a request ended without an output; this is a bug in bijax.")
        return last

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets a last output with the reason "abort". Returns whether there was one."""

        def abort() -> bool:
            output = self.engine.abort(request_id)
            if output is not None:
                self._deliver(output)
            return output is not None

        return bool(await asyncio.wrap_future(self._submit(abort)))

    async def flush_cache(self) -> None:
        """Empties the prefix cache."""
        await asyncio.wrap_future(self._submit(self.engine.flush_cache))

    async def pause(self) -> None:
        """Stops computing after the current step. Requests are accepted and wait."""
        await asyncio.wrap_future(self._submit(self.engine.pause))

    async def resume(self) -> None:
        """Ends a pause."""
        await asyncio.wrap_future(self._submit(self.engine.resume))

    async def update_weights(self, weights: Any, version: str | None = None) -> None:
        """Replaces the weights between two steps; see `Engine.update_weights`."""
        await asyncio.wrap_future(self._submit(lambda: self.engine.update_weights(weights, version)))

    async def drain(self) -> None:
        """Refuses new requests, and waits for the existing ones; during a pause, for its end."""
        self._draining = True
        while self._error is None and not self._closed:
            if await asyncio.wrap_future(self._submit(lambda: not self._streams)):
                return
            await asyncio.to_thread(self._idle.wait, 0.1)

    async def close(self) -> None:
        """Ends the thread. Streams that are not finished get an `EngineError`."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def stats(self) -> EngineStats:
        """Returns the numbers after the last step."""
        return self._stats

    def _submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Lets the engine's thread call a function between two steps."""
        command = _Command(function)
        with self._condition:
            if self._closed or self._error is not None:
                command.future.set_exception(EngineError(f"the engine has stopped: {self._error or 'it was closed'}."))
            else:
                self._commands.append(command)
                self._condition.notify()
        return command.future

    def _run(self) -> None:
        try:
            while self._wait():
                while self._commands:
                    self._commands.popleft().run()
                for output in self.engine.step(self._watched):
                    self._deliver(output)
                self._stats = self.engine.stats()
        except BaseException as error:
            self._error = error
        self._stop()

    def _wait(self) -> bool:
        """Waits for work; returns False when the engine is closed."""
        with self._condition:
            while not (self._commands or self.engine.has_work or self._closed):
                self._idle.set()
                self._condition.wait()
            self._idle.clear()
            return not self._closed

    def _stop(self) -> None:
        """Ends all streams and calls that still wait, with the error."""
        with self._condition:
            self._closed = True
            left = list(self._commands)
            self._commands.clear()
        self._idle.set()
        error = EngineError(f"the engine has stopped: {self._error or 'it was closed'}.")
        for command in left:
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(error)
        for mailbox in self._streams.values():
            mailbox.put(error)
        left_alone = list(self._streams)
        self._streams.clear()
        for name in left_alone:  # no one will await them, and the engine remains usable
            self.engine.abort(name)

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._streams.get(output.request_id)
        if mailbox is not None:
            if output.finished:
                self._forget(output.request_id)
            mailbox.put(output)

    def _leave(self, name: str, mailbox: "_Mailbox") -> None:
        if self._streams.get(name) is mailbox:
            self._forget(name)
            self.engine.abort(name)

    def _forget(self, name: str) -> None:
        del self._streams[name]
        self._watched.discard(name)


@dataclass(eq=False)
class _Command:
    """A function for the engine's thread, and its result."""

    function: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


class _Mailbox:
    """The newest output of a request, for a coroutine that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._there = asyncio.Event()
        self._newest: RequestOutput | EngineError | None = None

    def put(self, item: RequestOutput | EngineError) -> None:
        """Called by the engine's thread."""

        def put() -> None:
            self._newest = item
            self._there.set()

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: no one awaits it
            return

    async def take(self) -> RequestOutput:
        """Waits for an output that was not consumed yet."""
        await self._there.wait()
        self._there.clear()
        item, self._newest = self._newest, None
        if isinstance(item, EngineError):
            raise item
        if item is None:
            raise EngineError("an output was announced and is not there; this is a bug in bijax.")
        return item
