"""The engine in a thread of its own: streams, clients that leave, ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bijax.serving import AsyncEngine, EngineError, QueueFullError, SamplingParams
from tests.serving.traffic import bits, engine

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_new_tokens=12, logprobs=True, seed=1)


def serve(body: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        async with AsyncEngine(engine(speculative_tokens=0, **options)) as serving:
            await body(serving)

    asyncio.run(asyncio.wait_for(run(), 240))


def test_streams_and_clients_that_leave() -> None:
    async def body(serving: AsyncEngine) -> None:
        last = None
        async for output in serving.stream(PROMPT, PARAMS):
            tokens = output.completions[0].tokens
            assert last is None or tokens[: len(last)] == last
            last = tokens
        whole = await serving.generate(PROMPT, PARAMS)
        assert whole.completions[0].tokens == last
        # Ten at once, of which some leave: the others get the same bits, and all pages come back.
        keep = [asyncio.create_task(serving.generate(PROMPT, PARAMS)) for _ in range(4)]
        leave = [asyncio.create_task(serving.generate((9,), SamplingParams(max_new_tokens=60))) for _ in range(3)]
        stream = serving.stream((8,), SamplingParams(max_new_tokens=60))
        async for _ in stream:
            break
        await stream.aclose()
        for task in leave:
            task.cancel()
        for output in await asyncio.gather(*keep):
            assert bits(output) == bits(whole)
        await serving.drain()
        stats = serving.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        with pytest.raises(EngineError, match="draining"):
            await serving.generate(PROMPT, PARAMS)

    serve(body)


def test_abort_pause_and_errors() -> None:
    async def body(serving: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            await serving.generate(())
        await serving.pause()
        waiting = [
            asyncio.create_task(serving.generate(PROMPT, PARAMS, request_id=name)) for name in ("one", "two", "three")
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting[:2])
        with pytest.raises(QueueFullError, match="max_waiting=2"):
            await waiting[2]
        assert await serving.abort("one")
        assert not await serving.abort("unknown")
        aborted = await waiting[0]
        assert aborted.completions[0].finish_reason == "abort"
        await serving.resume()
        assert (await waiting[1]).completions[0].finish_reason == "length"

    serve(body, max_waiting=2)


def test_an_engine_that_fails_says_so() -> None:
    async def body(serving: AsyncEngine) -> None:
        serving.engine.step = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="out of memory"):
            await serving.generate(PROMPT, PARAMS)
        assert isinstance(serving.error, MemoryError)
        with pytest.raises(EngineError, match="out of memory"):
            await serving.generate(PROMPT, PARAMS)

    def fail(*_: Any) -> Any:
        raise MemoryError("out of memory")

    serve(body)


def test_closing_ends_streams() -> None:
    async def body(serving: AsyncEngine) -> None:
        await serving.pause()
        waiting = asyncio.create_task(serving.generate(PROMPT, PARAMS))
        await asyncio.sleep(0.05)
        await serving.close()
        with pytest.raises(EngineError, match="it was closed"):
            await waiting
        serving.engine.resume()  # it has dropped the request that no one awaits
        assert not serving.engine.has_work
        assert serving.engine.stats().num_waiting == 0

    serve(body)
