"""Options of the engine: as arguments, flags of commands, and environment variables."""

from dataclasses import dataclass

from bijax.parallel import TOKEN_DISTRIBUTION_THRESHOLD, Overlap
from bijax.serving.option_fields import Options, option

MAX_DRAFTS = 7
PROMPT_LOOKUP, MTP = "prompt_lookup", "mtp"


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
        "fraction of the memory for weights and cache (default on a GPU: 0.85); on a CPU, fraction of the free memory"
        " for the cache (default: a quarter, at most 1 GiB)",
        kind=float,
        least=0.01,
        most=1.0,
    )
    max_running: int = option(32, "maximum number of sequences that are computed together", least=1)
    max_waiting: int = option(1024, "maximum number of sequences that wait; further ones are refused", least=1)
    max_prefill_tokens: int = option(256, "maximum number of prompt tokens that are computed in one step", least=1)
    max_length: int | None = option(
        None, "maximum length of a sequence in tokens; by default that of the model", least=2
    )
    prefix_cache: bool = option(True, "reuse the cached pages of requests that start with the same tokens", kind=bool)
    state_snapshots: int | None = option(
        None, "number of states that are kept to be reused, for a model with linear attention; by default 2 for each"
        " running sequence", least=0,
    )  # fmt: skip
    snapshot_interval: int = option(
        4096,
        "number of tokens of a long prompt between two states that are kept; a multiple of 64 and of page_size",
        least=64,
    )
    speculative_tokens: int = option(
        0, "maximum number of tokens that are drafted for a sequence in one step", least=0, most=MAX_DRAFTS
    )
    speculative_algorithm: str = option(
        PROMPT_LOOKUP,
        "what drafts tokens: prompt_lookup, a look-up of the last tokens earlier in the sequence; mtp, the model's head"
        " for multi-token prediction; used with speculative_tokens",
        kind=str,
        choices=(PROMPT_LOOKUP, MTP),
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
    aging_steps: int = option(256, "number of steps after which a waiting request moves up by one priority", least=1)

    moe_a2a_backend: str = option(
        "none", "how tokens are sent to experts on other devices with overlap: all_to_all; none: no overlap", kind=str,
        choices=("none", "all_to_all"),
    )  # fmt: skip
    enable_two_batch_overlap: bool = option(
        False,
        "compute one half of a batch while the tokens of the other half are sent to experts; needs moe_a2a_backend",
        kind=bool,
    )
    enable_single_batch_overlap: bool = option(
        False, "compute a part of the experts' work while other parts are sent; needs moe_a2a_backend", kind=bool
    )
    tbo_token_distribution_threshold: float = option(
        TOKEN_DISTRIBUTION_THRESHOLD,
        "minimum fraction of the prompt tokens in each half; a sequence is cut if whole ones give less (0: never)",
        kind=float, least=0.0, most=0.5,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_overlap()
        if self.speculative_algorithm == MTP and not self.speculative_tokens:
            raise ValueError(
                f"EngineOptions: speculative_tokens must be from 1 to {MAX_DRAFTS} with speculative_algorithm={MTP!r},"
                f" got 0; set it, or leave speculative_algorithm at {PROMPT_LOOKUP!r}."
            )
        if self.seed_from_prompt and self.default_seed is not None:
            raise ValueError(
                f"EngineOptions: default_seed must be None with seed_from_prompt, got {self.default_seed}; choose one."
            )

    def overlap(self) -> Overlap | None:
        """Returns what the model is to compute with, or None."""
        if self.enable_two_batch_overlap:
            return Overlap("two_batch", self.tbo_token_distribution_threshold)
        return Overlap("single_batch") if self.enable_single_batch_overlap else None

    def _check_overlap(self) -> None:
        two, single = self.enable_two_batch_overlap, self.enable_single_batch_overlap
        if two and single:
            raise ValueError(
                "EngineOptions: enable_two_batch_overlap must be False with enable_single_batch_overlap, got True for"
                " both; choose one."
            )
        name = "enable_two_batch_overlap" if two else "enable_single_batch_overlap"
        if (two or single) != (self.moe_a2a_backend != "none"):
            wanted = f"be all_to_all with {name}" if two or single else "be none without overlap"
            raise ValueError(
                f"EngineOptions: moe_a2a_backend must {wanted}, got {self.moe_a2a_backend!r}; set both, or neither."
            )
        if (two or single) and not self.enable_deterministic_inference:
            raise ValueError(
                f"EngineOptions: {name} must be False without enable_deterministic_inference, got True; plain JAX"
                " operations have no overlap."
            )
        if two and self.speculative_tokens:
            raise ValueError(
                "EngineOptions: speculative_tokens must be 0 with enable_two_batch_overlap, got"
                f" {self.speculative_tokens}; drafts are not split."
            )
        threshold = self.tbo_token_distribution_threshold
        if not two and threshold != TOKEN_DISTRIBUTION_THRESHOLD:
            raise ValueError(
                f"EngineOptions: tbo_token_distribution_threshold must be {TOKEN_DISTRIBUTION_THRESHOLD} without"
                f" enable_two_batch_overlap, got {threshold}."
            )
