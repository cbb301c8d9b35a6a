"""Mosaic's interpreter as the tests of Hopper kernels run it: with its race detector on, which counts and goes on."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

type Races = Callable[[], int]
"""What the fixture `races` returns: a function that gives the number of races found so far."""


def interpreter(**options: Any) -> plgpu.InterpretGPUParams:
    """Races are reported as text: JAX 0.11 does nothing else, 0.12 would raise and leave the interpreter unusable."""
    fields = {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
    if "on_race" in fields:
        options["on_race"] = "warn"
    return plgpu.InterpretGPUParams(detect_races=True, **options)
