"""Serving a list of prompts in the calling thread."""

from collections.abc import Container, Sequence
from typing import Protocol

from bijax.serving.errors import QueueFullError
from bijax.serving.outputs import RequestOutput
from bijax.serving.params import SamplingParams


class _Engine(Protocol):
    def add(self, prompt_tokens: Sequence[int], params: SamplingParams) -> str: ...
    def step(self, watched: Container[str] | None) -> list[RequestOutput]: ...
    def abort(self, request_id: str) -> RequestOutput | None: ...


def serve_all(
    engine: _Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Serves prompts and returns their outputs, in their order; ends all of them if it is interrupted.

    Args:
        engine: The engine. Its other requests are served too, and their outputs are dropped.
        prompts: Tokens of each prompt.
        params: For each.

    Raises:
        TypeError: As `Engine.add`.
        ValueError: As `Engine.add`.
    """
    requests = list(zip(prompts, params, strict=True))
    added = 0
    indices: dict[str, int] = {}
    outputs: dict[int, RequestOutput] = {}
    try:
        while added < len(requests) or indices:
            while added < len(requests):
                try:
                    indices[engine.add(*requests[added])] = added
                except QueueFullError:  # the others follow when these have run
                    break
                added += 1
            for output in engine.step(()):
                if output.finished and output.request_id in indices:
                    outputs[indices.pop(output.request_id)] = output
    finally:
        for name in indices:
            engine.abort(name)
    return [outputs[index] for index in range(len(requests))]
