"""Waiting for stages of shared memory that are filled by one warpgroup and read by others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def await_free(position: Any, stages: int, free: Any) -> None:
    """Waits at the barrier of a stage until it has been read, unless nothing was in it before this position."""
    pl.when(position >= stages)(partial(plgpu.barrier_wait, free))


def drain(barriers: Sequence[Any], stages: int, filled: Any, slot: Callable[[Any], Any] | None = None) -> None:
    """Waits until the stages that were filled last are free: every signal is awaited.

    Args:
        barriers: Those of free stages of each array.
        stages: Number of stages.
        filled: How often a stage was filled.
        slot: Gives the stage of a position; by default they come one after the other.
    """

    @pl.loop(0, jnp.minimum(filled, stages))
    def _(i: Any) -> None:
        position = jnp.maximum(filled - stages, 0) + i
        at = lax.rem(position, stages) if slot is None else slot(position)
        for free in barriers:
            plgpu.barrier_wait(free.at[at])
