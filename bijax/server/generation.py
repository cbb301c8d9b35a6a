"""Runs the prompts of a request through the engine, concurrently."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from bijax.serving import EngineError, QueueFullError, RequestOutput

from .engine import Engine
from .errors import ApiError
from .metrics import Metrics
from .prompts import Prompt

RETRY_AFTER_S = 1  # when the queue is full: places become free at every step


class Generation:
    """The requests that run.

    Args:
        engine: The engine.
        metrics: Where latencies are counted.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine = engine
        self._metrics = metrics
        self._running: defaultdict[str, set[str]] = defaultdict(set)  # the client's name -> the engine's

    @property
    def num_running(self) -> int:
        """Prompts that are not finished."""
        return sum(map(len, self._running.values()))

    async def finish(self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]) -> list[RequestOutput]:
        """The finished outputs of all prompts, in their order.

        Raises:
            ApiError: If the engine refuses a prompt or stops; then the other prompts are aborted.
        """
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.stream(prompts, tokens)) as outputs:
            async for index, output in outputs:
                last[index] = output
        return [last[index] for index in range(len(prompts))]

    async def stream(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields the index of a prompt and all that it has got so far, whenever there is more.

        A reader that is slower than the engine misses some; the last output of each prompt is always yielded. Closing
        the generator aborts unfinished requests.

        Raises:
            ApiError: As for `finish`.
        """
        latest: dict[int, RequestOutput] = {}
        changed = asyncio.Event()

        async def follow(index: int) -> None:
            async with aclosing(self._follow(prompts[index], tokens[index])) as outputs:
                async for output in outputs:
                    latest[index] = output
                    changed.set()

        tasks = [asyncio.create_task(follow(index)) for index in range(len(prompts))]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                changed.clear()
                done = all(task.done() for task in tasks)
                while latest:
                    yield latest.popitem()
                for task in tasks:
                    if task.done():
                        task.result()  # re-raises its exception
                if done and not latest:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, rid: str | None) -> int:
        """Aborts the requests with this client-side id, or all; returns the number of prompts."""
        names = [name for key, names in self._running.items() if rid in (None, key) for name in names]
        return sum([await self.engine.abort(name) for name in names])

    async def _follow(self, prompt: Prompt, tokens: Sequence[int]) -> AsyncGenerator[RequestOutput]:
        name = uuid.uuid4().hex
        key = name if prompt.rid is None else prompt.rid
        self._running[key].add(name)
        latency = self._metrics.latency()
        started = False
        try:
            async with aclosing(
                self.engine.stream(tokens, prompt.params, request_id=name, priority=prompt.priority)
            ) as outputs:
                async for output in outputs:
                    started = True
                    latency.saw(output)
                    yield output
        except QueueFullError as error:
            raise ApiError(429, str(error), retry_after_s=RETRY_AFTER_S) from error
        except (TypeError, ValueError) as error:
            if started:
                raise  # not the client's fault
            raise prompt.names.explained(error, prompt.field) from error
        except EngineError as error:
            raise ApiError(503, str(error)) from error
        finally:
            self._running[key].discard(name)
            if not self._running[key]:
                del self._running[key]
