"""Starts a server for a checkpoint."""

import asyncio
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bijax.serving import AsyncEngine, Engine, EngineOptions, ModelOptions
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import check_model, check_overlap, find_model, load_adapters, load_models, load_update
from bijax.serving.options import MTP, PROMPT_LOOKUP
from bijax.serving.processes import LeadingEngine
from flax_layers.checkpoint import Checkpoint, CheckpointError, LoRA, load_checkpoint

from .engine import Engine as ServedEngine
from .errors import ServeError
from .logs import set_up_logs
from .model import ServedModel
from .options import ServerOptions
from .processes import check_mesh_size, join, lead, run_follower
from .replicas import Replicas
from .run import listen, serve
from .service import Service

log = logging.getLogger("bijax.server")

_THREAD = "bijax-start"
PROGRESS_S = 5.0  # between two lines about the warm-up


def start(name: str | None, options: ServerOptions, model_options: ModelOptions, engine_options: EngineOptions) -> int:
    """Serves a checkpoint until a signal arrives.

    Args:
        name: A GGUF file, a Hugging Face folder, or a name on the hub; None for SmolLM2.
        options: Of the server.
        model_options: Of the model.
        engine_options: Of the engine.

    Returns:
        The exit code.

    Raises:
        ServeError: If there is no such checkpoint, it cannot be served with these options and devices, or the address
            cannot be bound.
    """
    if options.nnodes > 1:
        if engine_options.speculative_algorithm == MTP:
            raise ServeError(
                f"speculative_algorithm must be {PROMPT_LOOKUP!r} with several processes, got {MTP!r}: a head is loaded"
                " by one process"
            )
        join(options)
    try:
        if options.nnodes > 1:
            check_mesh_size(model_options)
        path = find_model(name)
        checkpoint = load_checkpoint(path, tokenizer=not options.skip_tokenizer_init)
        drafts = engine_options.speculative_algorithm == MTP
        check_model(checkpoint, model_options, number=options.data_parallel_size, draft_head=drafts)
        check_overlap(checkpoint, model_options, engine_options)
        adapters = load_adapters(checkpoint, model_options)
    except (CheckpointError, OSError, ValueError) as error:
        raise ServeError(str(error)) from error
    model = _served_model(
        checkpoint, name or str(path), options.served_model_name, (model_options, engine_options), options.nnodes
    )
    if model.name in adapters:
        raise ServeError(f"an adapter must not have the model's name, got {model.name!r}; rename it in --lora-paths")
    if options.node_rank > 0:
        set_up_logs(options.log_format)
        return run_follower(checkpoint, options, model_options, engine_options)
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        raise ServeError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}") from error
    set_up_logs(options.log_format)
    if checkpoint.tokenizer is None:
        log.info("no tokenizer: requests must bring token ids (input_ids of /generate)")
    log.info("%s on http://%s:%d", model.name, *listener.getsockname()[:2])

    leaders: list[LeadingEngine] = []

    async def open_engine() -> ServedEngine:
        if options.nnodes > 1:
            leader, service.fingerprint = await _in_thread(
                lambda: lead(checkpoint, options, model_options, engine_options)
            )
            leaders.append(leader)
            return AsyncEngine(leader)
        engines, service.fingerprint = await _in_thread(
            lambda: _warm_engines(checkpoint, options.data_parallel_size, model_options, engine_options, adapters)
        )
        return AsyncEngine(engines[0]) if len(engines) == 1 else Replicas([AsyncEngine(e) for e in engines])

    try:
        service = Service(model, options, open_engine, engine_options, model_options)
    except ValueError as error:
        raise ServeError(str(error)) from error
    code = serve(service, listener)
    for leader in leaders:
        leader.dismiss()
    log.info("stopped")
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        # Stopped during startup: XLA is still compiling, and would crash while the interpreter shuts down.
        logging.shutdown()
        os._exit(code)
    return code


def _served_model(
    checkpoint: Checkpoint,
    path: str,
    name: str | None,
    options: tuple[ModelOptions, EngineOptions],
    processes: int,
) -> ServedModel:
    def load_new(other: str) -> Any:
        return load_update(_same_dtype(checkpoint, find_model(other)), model_options, draft_head=drafts)

    config, (model_options, engine_options) = checkpoint.config, options
    drafts = engine_options.speculative_algorithm == MTP
    longest = config.max_position_embeddings
    if engine_options.num_pages is not None:
        longest = min(longest, engine_options.num_pages * engine_options.page_size)
    if name is None:  # "." has no name of its own
        name = Path(path).resolve().name.removesuffix(".gguf") if Path(path).exists() else path
    return ServedModel(
        name=name,
        path=path,
        vocab_size=config.vocab_size,
        max_model_len=longest if engine_options.max_length is None else min(longest, engine_options.max_length),
        tokenizer=checkpoint.tokenizer,
        load_weights=None if processes > 1 else load_new,
        adapters={adapter: str(path) for adapter, path in model_options.adapters().items()},
    )


def _same_dtype(served: Checkpoint, path: Path) -> Checkpoint:
    """Other weights for a model keep its dtype, whatever dtype they are stored in."""
    return dataclasses.replace(load_checkpoint(path, tokenizer=False), dtype=served.dtype)


def is_slow_dtype(stored: str, chosen: str, platform: str) -> bool:
    """Returns whether the user should know that another dtype is faster, since none was chosen.

    Args:
        stored: The dtype of the checkpoint.
        chosen: The option `dtype`.
        platform: JAX's name of the platform.

    Example:
        >>> is_slow_dtype("bfloat16", "auto", "cpu"), is_slow_dtype("bfloat16", "bfloat16", "cpu")
        (True, False)
    """
    return platform == "cpu" and chosen == "auto" and stored != "float32"


def _warm_engines(
    checkpoint: Checkpoint,
    number: int,
    model_options: ModelOptions,
    options: EngineOptions,
    adapters: dict[str, LoRA],
) -> tuple[list[Engine], str | None]:
    """Returns engines with equal models, and the fingerprint of their contracts if they have any."""
    log.info("loading the weights")
    if is_slow_dtype(checkpoint.dtype, model_options.dtype, jax.default_backend()):
        log.info(
            "computing in %s, the dtype of the checkpoint; on a CPU --dtype float32 is faster, with different bits",
            checkpoint.dtype,
        )
    drafts = options.speculative_algorithm == MTP
    models = load_models(checkpoint, model_options, number=number, adapters=adapters, draft_head=drafts)
    engines = [
        Engine(model, tokenizer=checkpoint.tokenizer, eos_token_ids=checkpoint.config.eos_token_ids, options=options)
        for model in models
    ]
    log.info("the cache has room for %d tokens", min(engine.stats().cache_tokens for engine in engines))
    stats = engines[0].stats()
    if stats.state_bytes:
        log.info(
            "the state of a running sequence takes %.1f MB, each of %d snapshots %.1f MB",
            stats.state_bytes / 1e6,
            stats.num_snapshots,
            stats.snapshot_bytes / 1e6,
        )
    reported = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            log.info("warming up: %d of %d shapes", done, total)

    for engine in engines:
        engine.warm_up(on_progress)
    if not options.enable_deterministic_inference:
        return engines, None
    return engines, fingerprint(models[0], page_size=options.page_size)


async def _in_thread[T](function: Callable[[], T]) -> T:
    """Runs a function in a thread that does not keep the process from exiting, unlike asyncio's threads."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            result = function()
        except Exception as error:
            loop.call_soon_threadsafe(settle, lambda error=error: future.set_exception(error))
        else:
            loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return await future
