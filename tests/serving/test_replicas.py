"""Several engines with equal models as one engine of the server."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from bijax.server.replicas import Replicas
from bijax.serving import (
    AsyncEngine,
    Completion,
    EngineError,
    EngineStats,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from tests.serving.traffic import bits, engine

PARAMS = SamplingParams(max_new_tokens=4, logprobs=True, seed=1)
STATS = EngineStats(
    1, 2, 0.5, 3, 4, 5, 6, 7, 8, finished={"stop": 1}, cache_tokens=64, num_snapshots=4, snapshots_used=3
)


class Recorded:
    """An engine that records its calls, and serves until the test lets it continue."""

    def __init__(self, stats: EngineStats) -> None:
        self.error: BaseException | None = None
        self.requested: list[str] = []
        self.go_on = asyncio.Event()
        self._stats = stats

    async def stream(
        self, tokens: Any, params: Any, *, request_id: str, priority: int
    ) -> AsyncGenerator[RequestOutput]:
        self.requested.append(request_id)
        await self.go_on.wait()
        yield RequestOutput(request_id, tuple(tokens), (Completion(0, (1,), "", "length"),), True)

    async def abort(self, request_id: str) -> bool:
        return request_id in self.requested

    async def pause(self) -> None:
        self.requested.append("pause")

    async def update_weights(self, weights: Any, version: str | None) -> None:
        self.requested.append(f"update {version}")
        if weights is None:
            raise ValueError("other weights")

    def stats(self) -> EngineStats:
        return self._stats


def test_requests_go_where_the_fewest_are() -> None:
    async def body() -> None:
        engines: list[Any] = [Recorded(STATS), Recorded(STATS)]
        replicas = Replicas(engines)

        async def ask(name: str) -> RequestOutput:
            [output] = [o async for o in replicas.stream([5], PARAMS, request_id=name)]
            return output

        tasks = []
        for name in "abcd":
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0)
        assert [e.requested for e in engines] == [["a", "c"], ["b", "d"]]
        engines[1].go_on.set()
        await asyncio.gather(tasks[1], tasks[3])
        tasks += [asyncio.create_task(ask("e"))]
        await asyncio.sleep(0)
        assert engines[1].requested == ["b", "d", "e"]  # the first has two
        engines[0].go_on.set()
        assert [o.request_id for o in await asyncio.gather(*tasks)] == list("abcde")
        assert await replicas.abort("c")
        assert not await replicas.abort("nobody")
        await replicas.pause()
        assert [e.requested[-1] for e in engines] == ["pause", "pause"]
        with pytest.raises(ValueError, match="other weights"):
            await replicas.update_weights(None, "2")
        assert [e.requested[-1] for e in engines] == ["update 2", "pause"]  # what the first refuses changes none
        stats = replicas.stats()
        assert (stats.num_running, stats.num_waiting, stats.generated_tokens, stats.finished) == (2, 4, 16, {"stop": 2})
        assert (stats.kv_cache_usage, stats.cache_tokens) == (0.5, 64)
        assert (stats.num_snapshots, stats.snapshots_used) == (8, 6)  # the first engine's alone would be 4 and 3
        assert replicas.error is None
        engines[1].error = EngineError("it broke")
        assert replicas.error is engines[1].error

    asyncio.run(asyncio.wait_for(body(), 60))
    with pytest.raises(ValueError, match="at least one engine, got none"):
        Replicas([])


def test_a_full_engine_passes_a_request_on() -> None:
    """One request may be many sequences, so the engine with fewer requests may be the full one."""

    class Full(Recorded):
        async def stream(
            self, tokens: Any, params: Any, *, request_id: str, priority: int
        ) -> AsyncGenerator[RequestOutput]:
            self.requested.append(request_id)
            raise QueueFullError("8 sequences wait")
            yield  # a generator

    async def body() -> None:
        full, other = Full(STATS), Recorded(STATS)
        engines: list[Any] = [full, other]
        replicas = Replicas(engines)
        other.go_on.set()
        [output] = [o async for o in replicas.stream([5], PARAMS, request_id="a")]
        assert (output.request_id, full.requested, other.requested) == ("a", ["a"], ["a"])
        engines = [full, Full(STATS)]
        with pytest.raises(QueueFullError, match="8 sequences wait"):
            [o async for o in Replicas(engines).stream([5], PARAMS, request_id="b")]

    asyncio.run(body())


@pytest.mark.tier("full")
def test_each_engine_gives_the_same_bits() -> None:
    async def body() -> None:
        engines = [AsyncEngine(engine(speculative_tokens=0)) for _ in range(2)]
        replicas = Replicas(engines)

        async def ask(name: str, params: SamplingParams) -> Any:
            outputs = [o async for o in replicas.stream((5, 6, 7), params, request_id=name)]
            return bits(outputs[-1])

        several = await asyncio.gather(*(ask(name, PARAMS) for name in "abcdef"))
        assert all(one == several[0] for one in several)
        while replicas.stats().generated_tokens < 24:  # an engine counts after it has handed an output over
            await asyncio.sleep(0.01)
        assert [e.stats().generated_tokens for e in engines] == [12, 12]
        await replicas.close()

    asyncio.run(asyncio.wait_for(body(), 240))
