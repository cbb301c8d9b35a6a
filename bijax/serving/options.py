"""Options of the engine: as arguments, flags of commands, and environment variables."""

from dataclasses import dataclass

from bijax.serving.option_fields import Options, option

MAX_DRAFTS = 7


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """How an engine works. It checks itself.

    No option but `enable_deterministic_inference` can change a bit of the output of a request that names its seed;
    `default_seed` and `seed_from_prompt` choose the seed of one that does not.

    Raises:
        TypeError: If an option has the wrong type; the message names it.
        ValueError: If it is out of range.

    Example:
        >>> EngineOptions.read(page_size=32, environ={"BIJAX_PAGE_SIZE": "8", "BIJAX_NUM_PAGES": "64"}).page_size
        32
        >>> EngineOptions(page_size=0)
        Traceback (most recent call last):
            ...
        ValueError: EngineOptions: page_size must be at least 1, got 0.
    """

    page_size: int = option(16, "tokens of a page of the cache", least=1)
    num_pages: int | None = option(None, "pages of the cache; by default as many as there is memory for", least=1)
    mem_fraction_static: float | None = option(
        None,
        "part of the memory for weights and cache (0.85 by default on a GPU; on a CPU part of the free memory, for the"
        " cache, by default 1 GiB or a quarter)",
        kind=float,
        least=0.01,
        most=1.0,
    )
    max_running: int = option(32, "sequences computed at once, at most", least=1)
    max_waiting: int = option(1024, "sequences that may wait; more are refused", least=1)
    max_prefill_tokens: int = option(256, "tokens of prompts computed in a step, at most", least=1)
    max_length: int | None = option(None, "longest sequence in tokens; the model's by default", least=2)
    prefix_cache: bool = option(True, "keep computed pages for requests that start alike", kind=bool)
    state_snapshots: int | None = option(
        None, "states kept for requests that start alike, with a model that has states; 2 for each running sequence by"
        " default", least=0,
    )  # fmt: skip
    snapshot_interval: int = option(
        4096, "tokens of a long prompt between states that are kept; a multiple of 64 and of page_size", least=64
    )
    speculative_tokens: int = option(
        0, "tokens of a sequence drafted by prompt lookup in a step", least=0, most=MAX_DRAFTS
    )
    dispatch_ahead: bool = option(
        True, "dispatch a step before the tokens of the previous one are read (not with drafts)", kind=bool
    )
    enable_deterministic_inference: bool = option(
        True, "same bits for a request under any load; off: plain JAX operations", kind=bool
    )
    default_seed: int | None = option(
        None, "seed of requests that name none, the same for all; by default a new random one for each", least=0,
        most=2**64 - 1,
    )  # fmt: skip
    seed_from_prompt: bool = option(
        False, "requests that name no seed take a hash of their prompt: equal requests get equal texts", kind=bool
    )
    aging_steps: int = option(
        256, "steps of the engine after which a request counts as much as one a priority above", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed_from_prompt and self.default_seed is not None:
            raise ValueError(
                f"EngineOptions: default_seed must be None with seed_from_prompt, got {self.default_seed}; choose one."
            )
