"""A server whose model is cut over devices of several processes: process 0 listens, the others follow its engine."""

import dataclasses
import hashlib
import logging
import os
import signal
from typing import Any

import jax
import numpy as np

from bijax.parallel import check_processes
from bijax.serving import Engine, EngineOptions, ModelOptions
from bijax.serving.cache_size import choose_num_pages
from bijax.serving.errors import EngineError
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import load_adapters, load_models
from bijax.serving.processes import LeadingEngine, connect, follow, smallest_of_all
from flax_layers.checkpoint import Checkpoint, Weights

from .errors import ServeError
from .options import ServerOptions

log = logging.getLogger("bijax.server")

LOST = 1
"""The exit code of a process that has lost another one."""


def join(options: ServerOptions) -> None:
    """Finds the other processes (`jax.distributed`). JAX must not have initialised its devices before.

    Raises:
        ServeError: If they cannot be found.
    """
    try:
        jax.distributed.initialize(options.dist_init_addr, options.nnodes, options.node_rank)
    except (RuntimeError, ValueError) as error:
        raise ServeError(f"the {options.nnodes} processes at {options.dist_init_addr} did not meet: {error}") from error


def check_mesh_size(model_options: ModelOptions) -> None:
    """Checks that the model is cut over all devices of all processes.

    Raises:
        ValueError: If not.
    """
    found = (model_options.tensor_parallel_size or 1) * model_options.expert_parallel_size
    if found != jax.device_count():
        raise ValueError(
            "tensor_parallel_size times expert_parallel_size must be the number of devices of all processes, got"
            f" {found} with {jax.device_count()} devices in {jax.process_count()} processes."
        )


def open_engine(
    checkpoint: Checkpoint, options: ServerOptions, model_options: ModelOptions, engine_options: EngineOptions
) -> tuple[Engine, Any, str | None]:
    """Loads this process's part of the model, after comparing options, and then weights, with the other processes.

    Returns:
        The engine, in process 0 a `LeadingEngine`; in the others the connection to process 0; and the fingerprint of
        the contracts if they have any.

    Raises:
        ValueError: If processes disagree; the message names them.
    """
    given = {"model": str(checkpoint.config), "options": [str(model_options), str(engine_options)]}
    check_processes(version=jax.__version__, **given)
    digests: dict[str, str] = {}

    def note(name: str, value: np.ndarray) -> np.ndarray:
        digests[name] = hashlib.sha256(np.ascontiguousarray(value)).hexdigest()
        return value

    def read(name: str) -> np.ndarray:
        return note(name, checkpoint.weights[name])

    adapters = load_adapters(checkpoint, model_options)
    for adapter, lora in adapters.items():
        for side, matrices in (("A", lora.down), ("B", lora.up)):
            for layer, matrix in matrices.items():
                note(f"{adapter}: {layer}.lora_{side}", matrix * np.float32(lora.scaling))

    log.info("loading the weights")
    hashed = dataclasses.replace(checkpoint, weights=Weights(checkpoint.weights.shapes, read))
    [model] = load_models(hashed, model_options, adapters=adapters)
    check_processes(weights=digests)
    longest = min(model.max_length, engine_options.max_length or model.max_length)
    pages = smallest_of_all(choose_num_pages(model, engine_options, max_length=longest))
    engine_options = dataclasses.replace(engine_options, num_pages=pages)
    common: dict[str, Any] = {
        "tokenizer": checkpoint.tokenizer,
        "eos_token_ids": checkpoint.config.eos_token_ids,
        "options": engine_options,
    }
    name = None
    if engine_options.enable_deterministic_inference:
        name = fingerprint(model, page_size=engine_options.page_size)
        check_processes(contracts=name)
    host, _, _ = str(options.dist_init_addr).rpartition(":")
    connections = connect(host)
    if jax.process_index() == 0:
        return LeadingEngine(connections, model, **common), None, name
    return Engine(model, **common), connections[0], name


def lead(
    checkpoint: Checkpoint, options: ServerOptions, model_options: ModelOptions, engine_options: EngineOptions
) -> tuple[LeadingEngine, str | None]:
    """Opens the engine of process 0, warm, and ends this process with the code `LOST` if another one is lost."""
    engine, _, name = open_engine(checkpoint, options, model_options, engine_options)
    if not isinstance(engine, LeadingEngine):
        raise TypeError(f"only process 0 leads, and this is process {jax.process_index()}.")
    engine.watch(_lost)
    engine.warm_up(lambda done, total: log.info("warming up: %d of %d shapes", done, total) if done == total else None)
    return engine, name


def run_follower(
    checkpoint: Checkpoint, options: ServerOptions, model_options: ModelOptions, engine_options: EngineOptions
) -> int:
    """Serves as one of the processes that do not listen, until process 0 ends.

    Signals are left to process 0, which lets requests finish.

    Returns:
        The exit code: 0 if process 0 ended in order.

    Raises:
        ServeError: If processes disagree.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine, leader, _ = open_engine(checkpoint, options, model_options, engine_options)
    except ValueError as error:
        raise ServeError(str(error)) from error
    log.info("process %d of %d follows process 0", options.node_rank, options.nnodes)
    try:
        follow(engine, leader)
    except EngineError as error:
        _end(str(error))
    return 0


def _lost(number: int, why: str) -> None:
    _end(f"process {number} is lost: {why}")


def _end(why: str) -> None:
    """Ends this process at once: a collective operation that waits for a lost process never returns."""
    log.error("%s; this process ends", why)
    logging.shutdown()
    os._exit(LOST)
