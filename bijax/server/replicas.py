"""Several engines with equal models, each on devices of its own, as one engine (data parallelism)."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from bijax.serving import AsyncEngine, EngineStats, QueueFullError, RequestOutput, SamplingParams

_ADDED = (
    *("num_running", "num_waiting", "prefix_queries", "prefix_hits", "preemptions", "compilations", "prompt_tokens"),
    *("generated_tokens", "drafted_tokens", "accepted_tokens", "num_snapshots", "snapshots_used"),
)


class Replicas:
    """Engines that share the requests; a `bijax.server.engine.Engine`.

    A request goes to the engine that has the fewest at that moment, the first of them if several have; if too many
    sequences wait there, to the next.

    Args:
        engines: The engines, with equal models and options.

    Raises:
        ValueError: If `engines` is empty.

    Guarantee: as `bijax.serving.Engine`: bits do not depend on which engine serves a request.
    """

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        if not engines:
            raise ValueError("Replicas: engines must hold at least one engine, got none.")
        self._engines = list(engines)
        self._open = [0] * len(engines)

    @property
    def error(self) -> BaseException | None:
        """The error that stopped one of the engines; None while all run."""
        return next((engine.error for engine in self._engines if engine.error is not None), None)

    async def stream(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput]:
        """Serves a request; see `AsyncEngine.stream`."""
        order = sorted(range(len(self._engines)), key=self._open.__getitem__)
        for chosen in order:
            self._open[chosen] += 1
            try:
                outputs = self._engines[chosen].stream(prompt_tokens, params, request_id=request_id, priority=priority)
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                return
            except QueueFullError:  # before the first output; a request may be several sequences
                if chosen == order[-1]:
                    raise
            finally:
                self._open[chosen] -= 1

    async def abort(self, request_id: str) -> bool:
        """Ends a request; returns whether there was one."""
        return any(await asyncio.gather(*(engine.abort(request_id) for engine in self._engines)))

    async def pause(self) -> None:
        """Stops all engines between two steps."""
        await asyncio.gather(*(engine.pause() for engine in self._engines))

    async def resume(self) -> None:
        """Ends a pause."""
        await asyncio.gather(*(engine.resume() for engine in self._engines))

    async def flush_cache(self) -> None:
        """Empties the prefix caches."""
        await asyncio.gather(*(engine.flush_cache() for engine in self._engines))

    async def update_weights(self, weights: Any, version: str | None = None) -> None:
        """Takes other weights, one engine after the other; see `AsyncEngine.update_weights`.

        The models are equal, so weights that the first engine refuses change none.
        """
        for engine in self._engines:
            await engine.update_weights(weights, version)

    async def close(self) -> None:
        """Stops all engines."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def stats(self) -> EngineStats:
        """Returns the sums over the engines, the mean usage of their caches, and the room of the smallest cache."""
        each = [engine.stats() for engine in self._engines]
        finished = sum((Counter(stats.finished) for stats in each), Counter())
        return dataclasses.replace(
            each[0],
            **{name: sum(getattr(stats, name) for stats in each) for name in _ADDED},
            finished=dict(finished),
            kv_cache_usage=sum(stats.kv_cache_usage for stats in each) / len(each),
            cache_tokens=min(stats.cache_tokens for stats in each),
        )
