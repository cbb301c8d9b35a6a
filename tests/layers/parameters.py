"""Random parameters without compiling initializers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(make: Callable[[], Any]) -> Any:
    """Returns a layer with random parameters, without compiling its initializers."""
    layer = flax_nnx.eval_shape(make)
    for i, (_, node) in enumerate(flax_nnx.iter_graph(layer)):
        if isinstance(node, flax_nnx.Param):
            node.set_value(jnp.asarray(normal(i, *node.shape) / node.shape[-2:][0] ** 0.5))
    return layer
