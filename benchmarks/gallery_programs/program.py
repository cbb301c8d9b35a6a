"""What the gallery has to know of a program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

EXAMPLES = 8
"""How many examples there are; the largest batch holds all of them."""

Function = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that computes something for each example of a batch.

    Attributes:
        name: "LIBRARY: what it is".
        make: Returns the function of a batch, and all examples as one batch: a pytree of arrays with the examples
            along the first axis, as the results have them.
    """

    name: str
    make: Callable[[], tuple[Function, Any]]

    @property
    def library(self) -> str:
        """The library that the program is written with."""
        return self.name.split(":")[0]


def take(batch: Any, examples: slice) -> Any:
    """Returns some of the examples of a batch."""
    return jax.tree.map(lambda a: a[examples], batch)


def normal(seed: int, *shape: int) -> jax.Array:
    """Returns normal numbers in float32, the same on every machine."""
    return jax.numpy.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")
