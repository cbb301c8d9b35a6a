"""The engine interface that the server needs; `bijax.serving.AsyncEngine` implements it."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from bijax.serving import EngineStats, RequestOutput, SamplingParams


class Engine(Protocol):
    """An engine that steps on its own, seen from an event loop."""

    @property
    def error(self) -> BaseException | None:
        """The error that stopped it; None while it runs."""
        ...

    def stream(
        self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput]:
        """Adds a request; yields all that it has got so far, whenever there is more.

        Closing the generator before its end aborts the request and frees its pages.

        Raises:
            TypeError: If the prompt or a parameter is of the wrong type.
            ValueError: If the prompt is too long, or a token is not in the vocabulary.
            QueueFullError: If too many requests wait.
            EngineError: If the engine has stopped.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets the output so far, with the reason "abort". Returns whether it existed."""
        ...

    async def pause(self) -> None:
        """Stops between two steps; requests keep their state."""
        ...

    async def resume(self) -> None:
        """Resumes."""
        ...

    async def flush_cache(self) -> None:
        """Clears the prefix cache."""
        ...

    async def update_weights(self, weights: Any, version: str) -> None:
        """Replaces the weights; the prefix cache is cleared.

        Raises:
            TypeError: If the model does not accept them in this format.
            ValueError: If they belong to another model. The old weights stay.
        """
        ...

    async def close(self) -> None:
        """Stops; streams that are not finished get an EngineError."""
        ...

    def stats(self) -> EngineStats:
        """Current statistics."""
        ...
