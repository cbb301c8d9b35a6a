"""The state of a server: which engine and model, and whether it takes requests."""

import asyncio
import dataclasses
import enum
import logging
import time
from collections.abc import Awaitable, Callable

from bijax.serving import EngineOptions, EngineStats, ModelOptions

from .engine import Engine
from .errors import ApiError
from .generation import Generation
from .metrics import Metrics
from .model import ServedModel
from .options import ServerOptions
from .token_text import TokenText

log = logging.getLogger("bijax.server")

DRAIN_POLL_S = 0.05


class Phase(enum.Enum):
    """Phase of a server's life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Service:
    """One server.

    Args:
        model: What is served.
        options: How.
        open_engine: Loads the model, warms the engine up and starts it, which may take minutes.
        engine_options: Of the engine, as `/server_info` shows them; None shows nothing.
        model_options: Of the model, for the same.

    Raises:
        ValueError: If `unknown_token_id` is not in the vocabulary.

    Attributes:
        phase: Only in READY are requests accepted that generate.
        failure: Why it failed, if it did.
        num_open: Requests that are not answered to the end.
        fingerprint: Of the engine's contracts (`bijax.serving.fingerprint`), set by who opens it; None if unknown.
    """

    def __init__(
        self,
        model: ServedModel,
        options: ServerOptions,
        open_engine: Callable[[], Awaitable[Engine]],
        engine_options: EngineOptions | None = None,
        model_options: ModelOptions | None = None,
    ) -> None:
        unknown = options.unknown_token_id
        if unknown is not None and unknown >= model.vocab_size:
            raise ValueError(
                f"ServerOptions: unknown_token_id must be from 0 to {model.vocab_size - 1} with this model, got"
                f" {unknown}."
            )
        self.model = model
        self.options = options
        self.engine_options = engine_options
        self.model_options = model_options
        self.fingerprint: str | None = None
        self.metrics = Metrics(model.name, self._stats)
        self.tokens = TokenText(model.tokenizer)
        self.phase = Phase.STARTING
        self.failure: BaseException | None = None
        self.started_at = int(time.time())
        self.num_open = 0
        self._open_engine = open_engine
        self._generation: Generation | None = None

    async def start(self) -> None:
        """Opens the engine. On an error the phase is FAILED, and `failure` says why."""
        begin = time.monotonic()
        try:
            self._generation = Generation(await self._open_engine(), self.metrics)
        except Exception as error:
            self.phase, self.failure = Phase.FAILED, error
            log.error("the engine did not start: %s", error)
            return
        room = self._generation.engine.stats().cache_tokens
        if 0 < room < self.model.max_model_len:
            self.model = dataclasses.replace(self.model, max_model_len=room)
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
            log.info("ready after %.1f s", time.monotonic() - begin)

    async def drain(self) -> None:
        """Refuses new requests, and waits until the open ones are answered, for `drain_timeout` at most."""
        self.phase = Phase.DRAINING
        deadline = time.monotonic() + self.options.drain_timeout
        log.info("draining: %d open request%s", self.num_open, "" if self.num_open == 1 else "s")
        while self.num_open and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if self.num_open:
            log.warning("%d requests were not answered within %g s", self.num_open, self.options.drain_timeout)

    async def close(self) -> None:
        """Stops the engine."""
        if self._generation is not None:
            await self._generation.engine.close()

    @property
    def system_fingerprint(self) -> str | None:
        """OpenAI's field of this name: equal values of two servers on one architecture promise equal answers.

        This assumes that equal weight versions name equal weights.
        """
        stats = self._stats()
        return None if self.fingerprint is None or stats is None else f"fp_{self.fingerprint}-{stats.weight_version}"

    @property
    def num_running(self) -> int:
        """Prompts that are not finished."""
        return 0 if self._generation is None else self._generation.num_running

    def generation(self, *, draining: bool = False) -> Generation:
        """Runs prompts, and knows the engine.

        Args:
            draining: Whether a server that drains will do.

        Raises:
            ApiError: With status 503, unless the server is ready.
        """
        phases = (Phase.READY, Phase.DRAINING) if draining else (Phase.READY,)
        if self._generation is None or self.phase not in phases:
            raise ApiError(503, f"the server is {self.phase.value}", retry_after_s=self.options.retry_after)
        if self._generation.engine.error is not None:
            raise ApiError(503, f"the engine has stopped: {self._generation.engine.error}")
        return self._generation

    def _stats(self) -> EngineStats | None:
        return None if self._generation is None else self._generation.engine.stats()
