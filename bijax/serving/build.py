"""The scheduler, the states and the programs that an engine's options describe."""

from bijax.serving.cache_size import num_snapshots
from bijax.serving.model import Model, state_interval
from bijax.serving.options import MTP, EngineOptions
from bijax.serving.programs import Programs
from bijax.serving.scheduler import Scheduler
from bijax.serving.sizes import Sizes
from bijax.serving.states import States


def build_states(model: Model, options: EngineOptions) -> States | None:
    """Returns what decides which states are kept; None for a model without states.

    Args:
        model: The model.
        options: The options of the engine.
    """
    interval = state_interval(model)
    if interval is None:
        return None
    return States(
        interval=interval,
        page_size=options.page_size,
        num_snapshots=num_snapshots(options),
        snapshot_interval=options.snapshot_interval,
    )


def build_scheduler(options: EngineOptions, num_pages: int, states: States | None) -> Scheduler:
    """Returns the scheduler.

    Args:
        options: The options of the engine.
        num_pages: Pages of the cache.
        states: As `build_states` returns it.
    """
    return Scheduler(
        num_pages=num_pages,
        page_size=options.page_size,
        max_running=options.max_running,
        max_prefill_tokens=options.max_prefill_tokens,
        prefix_cache=options.prefix_cache,
        speculative_tokens=options.speculative_tokens,
        draft_head=options.speculative_algorithm == MTP,
        states=states,
    )


def build_programs(
    model: Model, options: EngineOptions, *, num_pages: int, max_length: int, states: States | None
) -> Programs:
    """Returns the programs, with an empty cache.

    Args:
        model: The model.
        options: The options of the engine.
        num_pages: Pages of the cache.
        max_length: Longest sequence, in tokens.
        states: As `build_states` returns it.
    """
    return Programs(
        model,
        Sizes.choose(
            max_running=options.max_running,
            max_prefill_tokens=options.max_prefill_tokens,
            speculative_tokens=options.speculative_tokens,
        ),
        num_pages=num_pages,
        page_size=options.page_size,
        table_width=-(-max_length // options.page_size),
        num_slots=options.max_running,
        batch_invariant=options.enable_deterministic_inference,
        num_snapshots=0 if states is None else num_snapshots(options),
        draft_steps=options.speculative_tokens if options.speculative_algorithm == MTP else 0,
    )
